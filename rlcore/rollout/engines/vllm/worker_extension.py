"""Methods that vLLM's worker gains, called through `collective_rpc`. Torch only: `worker_side` adds
what needs vLLM.

vLLM fuses q, k, v into `qkv_proj` and gate, up into `gate_up_proj`, pads the vocabulary and stores
tied embeddings once. With tensor parallelism it gives every rank a part. `_whole` undoes all of
this, so that checksums are taken of the weights as the engine holds them, under their Hugging Face
names. Its ranks are torch.distributed's default group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlcore.weights.experts import as_held, engine_place, in_engine
from rlcore.weights.manifest import tensor_checksum
from rlcore.weights.storages import EmptiedStorages

DIFFERENT = -1  # no tensor's checksum
_BASE = ".base_layer."  # between the names of an adapted layer and of its parameters
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # of a weight that is not quantised
Shapes = Mapping[str, tuple[int, ...]]


class WeightExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any
    rl_loaded: set[str]  # parameters that the model took of the set that is being loaded
    rl_relaying: bool
    rl_freed: EmptiedStorages

    def rl_check_live(self) -> None:
        """Raise RuntimeError if a weight was packed at load: it could not be replaced later."""
        empty = [n for n, p in self.model_runner.model.named_parameters() if p.numel() == 0]
        if empty:
            raise RuntimeError(
                f"vLLM packed {empty[0]} (and {len(empty) - 1} more): it could not be updated in "
                "place"
            )

    def rl_unmatched(self, shapes: Shapes) -> str:
        """How the engine holds one of these weights otherwise than under its Hugging Face name and
        in its shape. Such a weight could not be published to; "" if there is none."""
        model = self.model_runner.model
        params = {n.replace(_BASE, "."): p for n, p in model.named_parameters()}
        for name, shape in shapes.items():
            fused = params.get(_fused_name(model, name))
            if fused is not None and fused.dtype not in _PLAIN:
                continue  # quantised, in the layout of a kernel
            try:
                part, is_vocabulary = _held(model, params, name)
            except KeyError:
                return f"it holds no weight {name}"
            whole = dist.get_world_size() == 1 and not is_vocabulary
            if whole and tuple(part.shape) != tuple(shape):
                return f"it holds {name} as {tuple(part.shape)}, the files as {tuple(shape)}"
        return self.rl_unfilled(list(shapes))

    def rl_unfilled(self, names: list[str]) -> str:
        """A parameter that weights of these names leave as vLLM allocated it: a bias or a head that
        its model always has. vLLM says nothing of it. "" if there is none."""
        model = self.model_runner.model
        filled = {_fused_name(model, n) for n in names}
        for name, p in model.named_parameters():
            plain = p.dtype in _PLAIN and not name.endswith(("_scale", "_scale_inv"))
            if plain and name.replace(_BASE, ".") not in filled:
                return f"it holds {name}, for which the files have no weight"
        return ""

    def rl_release(self) -> int:
        """On the CPU: free keys and values; returns their bytes."""
        self.rl_freed = EmptiedStorages(self.model_runner.kv_caches, keep=False)
        return self.rl_freed.size

    def rl_take_back(self) -> None:
        """Allocate the memory of keys and values again."""
        self.rl_freed.restore()

    def rl_begin_load(self, quantised: bool) -> None:
        """A set of weights follows, in buckets. `quantised`: vLLM quantises them in the layout of
        its kernels again."""
        self.rl_loaded = set()
        self.rl_relaying = quantised
        if quantised:
            self.rl_begin_relayout()

    @torch.no_grad()
    def rl_load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a bucket of the set."""
        model = self.model_runner.model
        given = ((n, t) for n, t in tensors.items() if n not in second_names(model))
        self.rl_loaded |= {as_held(n.replace(_BASE, ".")) for n in model.load_weights(given)}

    @torch.no_grad()
    def rl_end_load(self, names: list[str]) -> None:
        """The set of these names is complete. Raises RuntimeError if the model did not take each
        one."""
        if self.rl_relaying:
            self.rl_end_relayout()
        self.rl_check_loaded(names, self.rl_loaded)

    def rl_check_loaded(self, names: list[str], loaded: Collection[str]) -> None:
        """Raise RuntimeError unless the model took every weight of these names."""
        model = self.model_runner.model
        expected = {_fused_name(model, n) for n in names if n not in second_names(model)}
        if missing := expected - set(loaded):
            raise RuntimeError(
                f"the engine did not load {sorted(missing)[0]} (and {len(missing) - 1} more)"
            )

    @torch.no_grad()
    def rl_check_patched(self, loaded: Collection[str]) -> None:
        """Raise RuntimeError if one of these parameters holds NaN. vLLM marks by NaN the entries
        that a patch leaves unchanged, and a loader that does not write by `Tensor.copy_` takes it
        for a value."""
        held = dict(self.model_runner.model.named_parameters())
        broken = {n: held[n].isnan().any() for n in loaded if n in held}
        if found := [n for n, nan in broken.items() if nan]:
            raise RuntimeError(
                f"patches have put NaN into {found[0]} (and {len(found) - 1} more): vLLM's loader "
                "of it does not take them (use cluster.full_weights_every=1)"
            )

    def rl_begin_relayout(self) -> None:
        """Make the model take weights as a checkpoint has them."""
        raise NotImplementedError

    def rl_end_relayout(self) -> None:
        """Quantise the loaded weights in the layout of vLLM's kernels, at their former
        addresses."""
        raise NotImplementedError

    def rl_with_file(self, method: str, path: str, *args: Any) -> Any:
        """Call a method whose first argument is a safetensors file's tensors: several ranks map
        the file without a copy."""
        return getattr(self, method)(load_file(path), *args)

    @torch.no_grad()
    def rl_checksums(self, shapes: Shapes, names: list[str]) -> dict[str, int]:
        """Checksums of `names`, whose Hugging Face shapes are in `shapes`; every rank must be asked
        for the same.

        DIFFERENT for a weight of which two ranks hold different copies. It is not raised, since
        vLLM stops listening to the other ranks at the first exception.
        """
        model = self.model_runner.model
        params = {n.replace(_BASE, "."): p for n, p in model.named_parameters()}
        dtype = self.model_runner.model_config.dtype
        wholes = ((n, _whole(_held(model, params, n), n, shapes[n])) for n in names)
        return _checksums((n, whole if whole is None else _in(dtype, whole)) for n, whole in wholes)

    @torch.no_grad()
    def rl_adapter_checksums(self, shapes: Shapes, names: list[str]) -> dict[str, int]:
        """Checksums of an adapter's factors (`weights/adapters.py`), read from the buffers that the
        layers compute with."""
        model = self.model_runner.model
        manager = getattr(self.model_runner, "lora_manager", None)
        # vLLM's adapted layers by name; none in an engine without adapters
        layers = {} if manager is None else manager._adapter_manager.modules
        parts = ((n, _Held(_factor(model, layers, n, shapes[n]), False)) for n in names)
        return _checksums((n, _whole(part, n, shapes[n])) for n, part in parts)

    def rl_quantised(self, names: list[str]) -> dict[str, list[str]]:
        """Those of `names` that vLLM holds quantised, each with all weights of its fused parameter
        in order."""
        model = self.model_runner.model
        params = dict(model.named_parameters())
        found = {n: _place(model, n) for n in names}
        return {
            n: parts
            for n, (fused, parts) in found.items()
            if fused in params and params[fused].dtype not in _PLAIN
        }

    @torch.no_grad()
    def rl_proven(self, published: Mapping[str, torch.Tensor]) -> list[str]:
        """Those of `published` (whole fused parameters) which, quantised once more, give the bits
        held on every rank.

        Every rank must be asked for the same; as in `rl_checksums` a difference is not raised.
        """
        model = self.model_runner.model
        proven: list[str] = []
        for name in published:
            fused, parts = _place(model, name)
            if name != parts[0]:
                continue
            module = model.get_submodule(fused.rpartition(".")[0])
            same = _holds(module, [published[n] for n in parts])
            if all(bool(t) for t in _gather(torch.tensor([same], device=module.weight.device))):
                proven += parts
        return proven


def _holds(module: Any, published: list[torch.Tensor]) -> bool:
    """Return whether a linear layer's parameters equal, to the bit, the layer's own quantisation of
    these weights on this rank."""
    sizes = module.logical_widths if len(published) > 1 else [sum(module.logical_widths)]
    parts = [
        _shard(t, (rows, module.input_size_per_partition))
        for t, rows in zip(published, sizes, strict=True)
    ]
    twin, method = copy.copy(module), copy.copy(module.quant_method)
    if hasattr(method, "fp8_linear"):
        method.fp8_linear = copy.copy(method.fp8_linear)
    # Own containers, so that the layer itself stays as it is.
    twin._parameters = {}
    twin._buffers = dict(module._buffers)
    twin._already_called_process_weights_after_loading = False
    twin.weight = torch.nn.Parameter(torch.cat(parts).to(module.weight.device), requires_grad=False)
    method.process_weights_after_loading(twin)
    return all(
        (held := module._parameters.get(n)) is not None
        and held.shape == p.shape
        and tensor_checksum(held) == tensor_checksum(p)
        for n, p in twin._parameters.items()
        if p is not None
    )


def _shard(whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's part of a linear weight: the inverse of `_whole`."""
    for d, size in enumerate(shape):
        if size != whole.shape[d]:
            copies = max(1, dist.get_world_size() * size // whole.shape[d])
            whole = whole.narrow(d, dist.get_rank() // copies * size, size)
    return whole


def _tied(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def second_names(model: Any) -> set[str]:
    """Names under which a tied weight could come a second time."""
    return {"lm_head.weight"} if _tied(model) else set()


def _place(model: Any, name: str) -> tuple[str, list[str]]:
    """(parameter, its parts in order) for a Hugging Face name: vLLM fuses linear layers, and has
    other names for the layers of some families."""
    if engine_place(name) is None:
        for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
            for part in parts:
                if f".{part}." in name and part != fused:
                    whole = name.replace(f".{part}.", f".{fused}.")
                    siblings = [name.replace(f".{part}.", f".{p}.") for p in parts]
                    return _renamed(model, whole), siblings
    return _renamed(model, name), [name]


def _renamed(model: Any, name: str) -> str:
    """The name of vLLM's module for one of a model folder."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        # what is stacked has been fused before
        name = replace(mapper, orig_to_new_stacked={}).map_name(name) or name
    layer, _, last = name.rpartition(".")
    if last == "A_log" and not hasattr(model.get_submodule(layer), last):
        return f"{layer}.A"  # of Mamba 2, see `keep_published`
    return name


def _fused_name(model: Any, name: str) -> str:
    if (place := engine_place(name)) is not None:
        return place.parameter
    return _place(model, name)[0]


def _rows(model: Any, parts: list[str], sizes: list[int]) -> list[int]:
    """Rows of each part of a fused layer, which a part may have several of.

    Example: q, k and v of a gated delta net are one part, z the other: [8, 8, 16, 16] gives [32,
    16]."""
    if len(sizes) == len(parts):
        return sizes
    stacked = model.model.hf_to_vllm_mapper.orig_to_new_stacked
    shards = [next(i for p, (_, i) in stacked.items() if f"{p}." in part) for part in parts]
    of_each = [i if isinstance(i, tuple) else (i,) for i in shards]
    return [sum(sizes[i] for i in each) for each in of_each]


def keep_published(
    load: Callable[[Any, torch.Tensor], None], function: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Any, torch.Tensor], None]:
    """vLLM's composed_weight_loader: a parameter holds a `function` of the weight that `load` gives
    it. Keeps the weight too, for checksums, and for patches that leave a part of it unchanged.

    The loader keeps it, and not the parameter: vLLM's reload on GPUs counts on the meta device and
    loads into another parameter with the same loader."""

    def composed(param: Any, loaded: torch.Tensor) -> None:
        published = kept.published
        if published is not None and not param.is_meta:
            param.data.copy_(published)
        load(param, loaded)
        if not param.is_meta:
            kept.published = param.data.clone()
        param.data.copy_(function(param.data))

    kept: Any = composed
    kept.published, kept.function = None, function
    return composed


def _as_published(param: Any) -> torch.Tensor:
    """The weight that was published to a parameter, if it holds that; else the parameter."""
    loader: Any = getattr(param, "weight_loader", None)
    published: torch.Tensor | None = getattr(loader, "published", None)
    if published is None or not torch.equal(loader.function(published), param):
        return param
    return published


def _in(dtype: torch.dtype, whole: torch.Tensor) -> torch.Tensor:
    """A weight in the engine's dtype, in which it came, if it is held in a wider one."""
    narrow = whole.to(dtype)
    return narrow if torch.equal(narrow.to(whole.dtype), whole) else whole


def _factor(
    model: Any, layers: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """This rank's part of one factor of the adapter. Raises KeyError for a layer without one."""
    layer, _, factor = name.removesuffix(".weight").rpartition(".")
    fused, parts = _place(model, f"{layer}.weight")
    adapted = layers[fused.removesuffix(".weight")]
    index = parts.index(f"{layer}.weight")
    # [slots, 1, rank or out, in or rank]; the buffers' rank may be larger than the adapter's
    if factor == "lora_A":
        return adapted.lora_a_stacked[index][0, 0, : shape[0]]
    return adapted.lora_b_stacked[index][0, 0, :, : shape[1]]


def _checksums(wholes: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, int]:
    return {n: DIFFERENT if whole is None else tensor_checksum(whole) for n, whole in wholes}


class _Held(NamedTuple):
    """The part of one Hugging Face weight that this rank holds."""

    part: torch.Tensor  # a view, padded rows included
    is_vocabulary: bool  # rows are split among ranks with their padding


def _held(model: Any, params: Mapping[str, torch.Tensor], name: str) -> _Held:
    """This rank's part of a weight. Raises KeyError for one that the engine does not hold."""
    if name == "lm_head.weight" and _tied(model):
        name = "model.embed_tokens.weight"
    if (place := engine_place(name)) is not None and place.parameter in params:
        return _Held(in_engine(place, params[place.parameter]), False)
    target, parts = _place(model, name)
    if target not in params:
        raise KeyError(f"the engine holds no weight {target} (for {name})")
    module = model.get_submodule(target.rpartition(".")[0])
    module = getattr(module, "base_layer", module)
    held = _as_published(params[target])
    if len(parts) > 1:
        held = held.split(_rows(model, parts, module.output_partition_sizes))[parts.index(name)]
    return _Held(held, hasattr(module, "num_embeddings_per_partition"))


def _whole(held: _Held, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The weight joined over all ranks, None if copies of a part differ.

    Raises RuntimeError if it has another shape than the checkpoint's.
    """
    parts = _gather(held.part)
    mine = held.part.shape
    split = (
        next((d for d in range(len(shape)) if mine[d] != shape[d]), 0)
        if len(mine) == len(shape)
        else 0
    )
    copies = 1 if held.is_vocabulary else max(1, mine[split] * len(parts) // shape[split])
    # Fewer KV heads than ranks, norms and the like: neighbouring ranks hold the same.
    for i, part in enumerate(parts):
        if i % copies and not torch.equal(part, parts[i - i % copies]):
            return None
    whole = torch.cat(parts[::copies], dim=split) if len(parts) > copies else parts[0]
    if held.is_vocabulary:
        whole = whole[: shape[0]]
    if tuple(whole.shape) != tuple(shape):
        raise RuntimeError(
            f"the engine holds {name} as {tuple(whole.shape)}, the checkpoint as {tuple(shape)}"
        )
    return whole


def _gather(part: torch.Tensor) -> list[torch.Tensor]:
    """The same view on every rank, in order."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous())
    return parts
