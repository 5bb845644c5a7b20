"""Micro-batches of variable count under a token budget, in layouts that compute the same thing.

sorted: rows of like length, right-padded. Causal attention keeps padding out of every real
position, so no mask is made; sequences that attend in both directions have `segments`.
packed: one row, `position_ids` restarting at each sequence (for a variable-length kernel,
flash-attn's or torch's; with SDPA transformers derives the block-diagonal mask from the
positions). shared: one row of the distinct prefixes of the sequences, so that a group's prompt is
computed once for all its responses (see `attention/shared_prefix.py`). Chosen instead of the others
where the model's attention allows it and it is less work.

An episode is one row of results, whatever number of sequences it takes. Its columns go on from part
to part, and its parts share a micro-batch, so that losses over sequences see all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlcore.attention.shared_prefix import SharedRows, TreeRow, blocks_of
from rlcore.interfaces import Reduce
from rlcore.learner.sequences import ScoredSequence, TokenSequence
from rlcore.learner.specs import LearnerSpec
from rlcore.types import PageRule

if TYPE_CHECKING:
    from rlcore.attention.shared_tree import SharedTree

# Keys and values that attention reads again take less memory than the activations of a position
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """U nodes, one for each distinct prefix of some sequences' inputs.

    Example, [5, 9, 4] and [5, 9, 7]: PrefixTree([5, 9, 4, 7], [0, 1, 2, 2], [[0, 1, 2],
    [0, 1, 3]], [0, 2])
    """

    tokens: np.ndarray  # [U] int64, last token of each prefix
    depths: np.ndarray  # [U] int64, its position
    paths: list[np.ndarray]  # of each sequence: [L] int64, the nodes of its positions
    firsts: list[int]  # of each sequence: the position from which on it added its nodes

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(positions, positions that it added) of each sequence."""
        return [(len(path), len(path) - first) for path, first in zip(self.paths, self.firsts)]

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> PrefixTree:
        inputs = [np.asarray(s.inputs, dtype=np.int64) for s in sequences]
        keys = [sort_key(s) for s in sequences]
        order = sorted(range(len(inputs)), key=lambda i: (keys[i], i))
        paths: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(inputs)
        firsts = [0] * len(inputs)
        nodes, before = 0, None
        for i in order:
            # in this order no earlier sequence has more in common with it than the one before
            first = 0 if before is None else common_length(inputs[before], inputs[i])
            end = nodes + len(inputs[i]) - first
            shared = paths[i] if before is None else paths[before][:first]
            paths[i] = np.concatenate([shared, np.arange(nodes, end)])
            firsts[i] = first
            nodes, before = end, i
        tokens = [inputs[i][firsts[i] :] for i in order]
        depths = [np.arange(firsts[i], len(inputs[i])) for i in order]
        return cls(np.concatenate(tokens), np.concatenate(depths), paths, firsts)


def in_batches(
    parts: Sequence[Sequence[TokenSequence]], budget: int, *, gathers: bool = True
) -> list[list[int]]:
    """Divide episodes into micro-batches of at most `budget` distinct prefixes each.

    Episodes with equal beginnings follow each other, the longest sequences first; a group
    that does not fit is continued in another micro-batch, which computes its prompt again. The
    shared positions that attention `gathers`, once for every sequence, are bounded, too. An episode
    beyond the budget is alone; those without sequences are left out.
    """
    weight = 1 / _REPEATS if gathers else 0.0
    batches: list[list[int]] = []
    before: TokenSequence | None = None
    nodes = keys = 0
    for i in _alike(parts):
        added = _added(parts[i], before)
        nodes, keys = nodes + added, keys + sum(map(len, parts[i]))
        if not batches or max(nodes, keys * weight) > budget:
            batches.append([])
            nodes, keys = _added(parts[i], None), sum(map(len, parts[i]))
        batches[-1].append(i)
        before = parts[i][-1]
    return batches


def _alike(parts: Sequence[Sequence[TokenSequence]]) -> list[int]:
    """Episodes by first observation, then by what follows it."""
    clusters: dict[bytes, list[tuple[bytes, int]]] = {}
    for i, sequences in enumerate(parts):
        if sequences:
            first = sequences[0]
            key = sort_key(first)
            clusters.setdefault(key[: 4 * first.prompt_len], []).append((key, i))
    longest = {
        prompt: max(len(s) for _, i in members for s in parts[i])
        for prompt, members in clusters.items()
    }
    order = sorted(clusters, key=lambda prompt: (-longest[prompt], clusters[prompt][0][1]))
    return [i for prompt in order for _, i in sorted(clusters[prompt])]


def _added(sequences: Sequence[TokenSequence], before: TokenSequence | None) -> int:
    """Positions that follow the common prefix of each sequence with the one before it."""
    added = 0
    for s in sequences:
        inputs = s.inputs
        added += len(inputs) - (0 if before is None else common_length(before.inputs, inputs))
        before = s
    return added


def sort_key(sequence: TokenSequence) -> bytes:
    """Orders sequences by their inputs: those with a common prefix are neighbours."""
    return np.asarray(sequence.inputs, dtype=">u4").tobytes()


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n


# Floating-point operations of matrix products that take as long as one of attention, and as moving
# one number to where attention reads it and its gradient back. Measured on CPU with models of 0.6M
# to 135M parameters; the choice depends little on them, since the layers outweigh both.
_ATTENTION = 4.0
_MOVE = 24.0
# Operations that take as long as a layer's cost at any size: a third of 6 to 19 ms a micro-batch of
# four layers, at 100 GFLOP/s
_BATCH = 1e8


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Floating-point operations of a forward pass, by its parts; the head is left out, since its
    work does not depend on the layout.

    Example: PassCosts(position=2.7e8, score=2.8e5, key=2.8e5, query=8.3e5)
    """

    position: float  # one position in every layer, without attention
    score: float  # one pair of query and key in every layer
    key: float  # gathering one position's key and value for attention, in every layer
    query: float  # gathering one query, and its output back
    batch: float = 0.0  # one micro-batch, whatever its size
    by_mask: bool = False  # attention over a tree is one mask over its nodes, and gathers nothing

    @classmethod
    def of(cls, lm: Any, *, by_mask: bool = False) -> PassCosts:
        """The costs of a causal LM, whole or divided among the ranks."""
        config = lm.config.get_text_config()
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        ends = {id(lm.get_input_embeddings().weight), id(lm.get_output_embeddings().weight)}
        whole = {id(p): getattr(p, "ds_shape", p.shape) for p in lm.parameters()}
        matrices = [s.numel() for i, s in whole.items() if len(s) >= 2 and i not in ends]
        return cls(
            position=2.0 * sum(matrices),
            score=4.0 * heads * width * layers * _ATTENTION,
            key=2.0 * kv_heads * width * layers * _MOVE,
            query=2.0 * heads * width * layers * _MOVE,
            batch=_BATCH * layers,
            by_mask=by_mask,
        )

    def plain(self, rows: int, width: int) -> float:
        """Rows of sequences, each attending by itself."""
        return rows * width * (self.position + self.score * width / 2)

    def cuts(self, lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[int]:
        """Where to divide padded rows for the least work: the end of each micro-batch.

        For items in order of falling length, `rows` each, a micro-batch has at most `budget`
        positions, or one item. The shortest path over all divisions.
        """
        ends = np.concatenate([[0], np.cumsum(rows)])
        count = len(lengths)
        best, cut = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        best[0] = 0.0
        for i, length in enumerate(lengths):
            most = int(np.searchsorted(ends, ends[i] + budget // length, side="right")) - 1
            to = slice(i + 1, max(most, i + 1) + 1)
            each = self.batch + (ends[to] - ends[i]) * self.plain(1, length)
            better = best[i] + each < best[to]
            best[to] = np.where(better, best[i] + each, best[to])
            cut[to] = np.where(better, i, cut[to])
        found = [count] if count else []
        while found and cut[found[-1]]:
            found.append(int(cut[found[-1]]))
        return found[::-1]

    def shared(self, tree: PrefixTree) -> float:
        """The nodes of a tree of sequences."""
        work = len(tree.tokens) * self.position
        if self.by_mask:
            return work + float((tree.depths + 1).sum()) * self.score
        for block in blocks_of(tree.sizes):
            rows = len(block.rows)
            work += block.scores * self.score
            work += rows * (block.keys * self.key + block.queries * self.query)
        return work


Layout = Literal["sorted", "packed"]
EpisodeTokens = Sequence[ScoredSequence]  # the parts of one episode, in order; usually one


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some whole episodes, laid out for the model: N sampled tokens of b episodes, in s sequences
    over R rows of W positions.

    Example, two sequences of 2 + 2 and 1 + 1 tokens, packed. input_ids [[5, 9, 4, 6]], position_ids
    [[0, 1, 2, 0]], predict [1, 2, 3], row [0, 0, 1], column [0, 1, 0]
    """

    input_ids: Tensor  # [R, W] int64
    position_ids: Tensor  # [R, W] int64
    predict: Tensor  # [N] int64, flat positions in R*W whose hidden state predicts a sampled token
    targets: Tensor  # [N] int64, those sampled tokens
    episodes: Tensor  # [b] int64, index of each episode among those packed; empty for a dummy
    row: Tensor  # [N] int64, 0..b-1: the token's episode
    column: Tensor  # [N] int64, 0..T-1: the token's index among its episode's sampled tokens
    # [s], on the host: first observation of each sequence, in the order of the rows
    prompt_lens: tuple[int, ...]
    # [N] float32: `TokenSequence.sharper` of each token; None: 1 everywhere
    sharper: Tensor | None = None
    # in the shared layout: how attention reads its positions
    shared: SharedRows | SharedTree | None = None
    # [R, W] int64, where attention has no order: a position attends to those of its row with the
    # same number; None: to all of them, or only to those before it in a causal model
    segments: Tensor | None = None
    # [R, W, layers, k] int16: the experts of each position, -1 where the model chooses them itself
    # (`policy.Replay`); None: everywhere
    routes: Tensor | None = None
    # [s]: the pages that the actor of each sequence attended to, None for the learner's own rule;
    # None: everywhere
    page_rules: tuple[PageRule | None, ...] | None = None
    # where the sequences of a packed row begin, on the host, which then waits for no device to lay
    # attention out; None: of several rows, of shared prompts
    starts: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    def dense(self, values: Tensor, width: int, fill: float | int | bool = 0.0) -> Tensor:
        """Per-token values [N, ...] as [b, width, ...], `fill` where there is no token.

        Differentiable.
        """
        shape = (len(self.episodes), width, *values.shape[1:])
        return values.new_full(shape, fill).index_put((self.row, self.column), values)

    def flat(self, dense: Tensor) -> Tensor:
        """The tokens [N, ...] of this micro-batch from a tensor [B, T, ...] over all episodes."""
        return dense[self.episodes[self.row], self.column]


# seven parameters: the last are where the tensors go, and two offers
def pack(
    episodes: Sequence[EpisodeTokens],
    micro_batch_tokens: int,
    layout: Layout,
    pad_id: int = 0,
    device: torch.device | str = "cpu",
    costs: PassCosts | None = None,
    tight: PassCosts | None = None,
) -> list[MicroBatch]:
    """Split episodes into micro-batches of at most `micro_batch_tokens` positions, padding
    included.

    A longer episode gets its own micro-batch. Sequences and episodes without sampled tokens
    are left out. Longest first, so that a lack of memory shows at once; ties by index, so that the
    same episodes always give the same batches. With `costs`, the shared layout is used where it is
    less work. With `tight`, sorted rows are divided for the least work, instead of filling each
    micro-batch.
    """
    # without a sampled token there is nothing to compute a loss or a score of
    parts = [tuple(s for s in episode if s.scored) for episode in episodes]
    batches = _plain_batches(parts, micro_batch_tokens, layout, tight)
    if costs is not None:
        each = [_causal(parts, [i]) for i in range(len(parts))]
        shared = in_batches(each, micro_batch_tokens, gathers=not costs.by_mask)
        trees = [PrefixTree.of(_causal(parts, batch)) for batch in shared]
        work = sum(costs.plain(*_plain_shape(parts, batch, layout)) for batch in batches)
        work += costs.batch * (len(batches) - len(shared))
        if sum(map(costs.shared, trees)) < work:
            rows = [_shared_row(tree, device, by_mask=costs.by_mask) for tree in trees]
            return [_micro_batch(parts, b, row, device) for b, row in zip(shared, rows)]
    lay_out = _padded_rows if layout == "sorted" else _packed_row
    rows = [lay_out(_sequences(parts, batch), pad_id) for batch in batches]
    return [_micro_batch(parts, b, laid, device) for b, laid in zip(batches, rows)]


def _sequences(parts: Sequence[EpisodeTokens], batch: Sequence[int]) -> list[ScoredSequence]:
    return [s for i in batch for s in parts[i]]


def _causal(parts: Sequence[EpisodeTokens], batch: Sequence[int]) -> list[TokenSequence]:
    """The causal sequences of a batch: no others have prefixes in common (`learner/build.py`)."""
    return [s for s in _sequences(parts, batch) if isinstance(s, TokenSequence)]


def _plain_batches(
    parts: Sequence[EpisodeTokens], budget: int, layout: Layout, tight: PassCosts | None
) -> list[list[int]]:
    """Divide episodes into micro-batches."""
    order = [i for i, sequences in enumerate(parts) if sequences]
    # rows of like length share a micro-batch; in one packed row only the sum matters
    size = max if layout == "sorted" else sum
    order.sort(key=lambda i: (-size(map(len, parts[i])), i))
    if tight is not None and layout == "sorted":
        widths = [max(map(len, parts[i])) for i in order]
        ends = tight.cuts(widths, [len(parts[i]) for i in order], budget)
        return [order[a:b] for a, b in zip([0, *ends], ends)]
    batches: list[list[int]] = []
    rows = width = total = 0
    for i in order:
        lengths = [len(s) for s in parts[i]]
        # the micro-batch with this episode in it
        rows, width, total = rows + len(lengths), max(width, *lengths), total + sum(lengths)
        needed = rows * width if layout == "sorted" else total
        if not batches or needed > budget:
            batches.append([])
            rows, width, total = len(lengths), max(lengths), sum(lengths)
        batches[-1].append(i)
    return batches


def _plain_shape(
    parts: Sequence[EpisodeTokens], batch: Sequence[int], layout: Layout
) -> tuple[int, int]:
    """Rows and positions in each."""
    lengths = [len(s) for s in _sequences(parts, batch)]
    return (len(lengths), max(lengths)) if layout == "sorted" else (1, sum(lengths))


def dummy(token: int = 0, device: torch.device | str = "cpu") -> MicroBatch:
    """One position and no episode: keeps ranks with fewer micro-batches in step with the others, at
    zero weight."""
    one = torch.full((1, 1), token, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=one,
        position_ids=torch.zeros_like(one),
        predict=zero,
        targets=one[0],
        episodes=nothing,
        row=nothing,
        column=nothing,
        prompt_lens=(1,),
        starts=(0,),
    )


@dataclass(frozen=True, slots=True)
class _Laid:
    """Sequences as rows of inputs. `places`: flat position of each position of each sequence."""

    input_ids: np.ndarray  # [R, W]
    position_ids: np.ndarray  # [R, W]
    places: Sequence[np.ndarray]  # [L] int64 each
    shared: SharedRows | SharedTree | None = None
    starts: tuple[int, ...] | None = None


def _padded_rows(sequences: Sequence[ScoredSequence], pad_id: int) -> _Laid:
    width = max(len(s) for s in sequences)
    # the padding token does not matter: no real position attends to it
    input_ids = np.full((len(sequences), width), pad_id, dtype=np.int64)
    for row, s in zip(input_ids, sequences):
        row[: len(s)] = s.inputs
    positions = np.broadcast_to(np.arange(width), input_ids.shape)
    places = [np.arange(len(s)) + r * width for r, s in enumerate(sequences)]
    return _Laid(input_ids, positions, places)


def _packed_row(sequences: Sequence[ScoredSequence], pad_id: int) -> _Laid:
    lengths = [len(s) for s in sequences]
    ends = np.cumsum(lengths)
    input_ids = np.concatenate([s.inputs for s in sequences])[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    places = [np.arange(e - n, e) for n, e in zip(lengths, ends)]
    return _Laid(input_ids, positions, places, starts=tuple((ends - lengths).tolist()))


def _shared_row(tree: PrefixTree, device: torch.device | str, *, by_mask: bool) -> _Laid:
    kind: type[SharedRows | SharedTree] = SharedRows
    if by_mask:
        from rlcore.attention.shared_tree import SharedTree

        kind = SharedTree
    rows = [TreeRow(path, first) for path, first in zip(tree.paths, tree.firsts)]
    shared = kind.of(rows, len(tree.tokens), device)
    return _Laid(tree.tokens[None], tree.depths[None], tree.paths, shared)


def _micro_batch(
    parts: Sequence[EpisodeTokens],
    batch: Sequence[int],
    laid: _Laid,
    device: torch.device | str,
) -> MicroBatch:
    """The episodes `batch`, whose sequences are laid out in this order."""
    sequences = _sequences(parts, batch)
    counts = [sum(s.scored for s in parts[i]) for i in batch]
    arrays = {
        "input_ids": laid.input_ids,
        "position_ids": laid.position_ids,
        "predict": np.concatenate([p[s.predicting] for p, s in zip(laid.places, sequences)]),
        "targets": np.concatenate([s.targets for s in sequences]),
        "episodes": np.array(batch),
        "row": np.repeat(np.arange(len(counts)), counts),
        "column": np.concatenate([np.arange(n) for n in counts]),
    }
    tensors = {n: torch.from_numpy(np.array(a, dtype=np.int64)) for n, a in arrays.items()}
    moved = {name: t.to(device) for name, t in tensors.items()}
    segments = _segments(sequences, laid, device)
    return MicroBatch(
        **moved,
        prompt_lens=tuple(s.prompt_len for s in sequences),
        sharper=_sharper(sequences, device),
        shared=laid.shared,
        segments=segments,
        routes=_routes(sequences, laid, device),
        page_rules=_page_rules(sequences),
        starts=laid.starts,
    )


def _page_rules(sequences: Sequence[ScoredSequence]) -> tuple[PageRule | None, ...] | None:
    """The page rule of each sequence; None where no sequence has its own rule."""
    found = tuple(s.page_rule if isinstance(s, TokenSequence) else None for s in sequences)
    return found if any(rule is not None for rule in found) else None


def _routes(
    sequences: Sequence[ScoredSequence], laid: _Laid, device: torch.device | str
) -> Tensor | None:
    """The routes of each position; None where no sequence has routes."""
    given = [s.routes if isinstance(s, TokenSequence) else None for s in sequences]
    shape = next((r.shape[1:] for r in given if r is not None), None)
    if shape is None:
        return None
    experts = np.full((laid.input_ids.size, *shape), -1, np.int16)
    for routes, places in zip(given, laid.places):
        if routes is not None:
            known = min(len(routes), len(places))
            experts[places[:known]] = routes[:known]
    return torch.from_numpy(experts.reshape(*laid.input_ids.shape, *shape)).to(device)


def _segments(
    sequences: Sequence[ScoredSequence], laid: _Laid, device: torch.device | str
) -> Tensor | None:
    """The sequence of each position, 0 for padding; None where every row is one whole sequence, or
    attention is causal."""
    if not any(s.bidirectional for s in sequences):
        return None
    numbers = np.zeros(laid.input_ids.shape, np.int64)
    for n, places in enumerate(laid.places, start=1):
        numbers.reshape(-1)[places] = n
    if (numbers == numbers[:, :1]).all():
        return None
    return torch.from_numpy(numbers).to(device)


def _sharper(sequences: Sequence[ScoredSequence], device: torch.device | str) -> Tensor | None:
    if all(s.sharper == 1 for s in sequences):
        return None
    values = np.repeat([s.sharper for s in sequences], [s.scored for s in sequences])
    return torch.from_numpy(values.astype(np.float32)).to(device)


MIB = 1 << 20


class KeptPasses:
    """Decides whether the activations that passes hold for their backward passes fit
    `learner.activation_cache_mib` on every rank.

    Judged by the bytes that one position held in the first pass measured: shapes alone decide, so
    that runs of one seed stay equal. Ranks differ in shapes, and keep or drop passes together.
    """

    def __init__(self, spec: LearnerSpec, reduce: Reduce) -> None:
        self._most = spec.activation_cache_mib * MIB
        self._reduce = reduce
        self._per_position: float | None = None  # bytes; None: not measured yet, on any rank

    def fit(self, micro: Sequence[MicroBatch]) -> bool:
        """Return whether these passes may be kept, as far as is known. Collective."""
        if self._per_position is None or not self._most:
            return self._most > 0
        needed = self._per_position * sum(mb.tokens for mb in micro)
        most_of_any = self._reduce.max(torch.tensor(needed, dtype=torch.float64))
        return float(most_of_any) <= self._most

    @contextlib.contextmanager
    def measured(self, mb: MicroBatch, parameters: Iterable[Tensor]) -> Iterator[None]:
        """A context that measures the differentiated pass of `mb`, once in a run."""
        if self._per_position is not None:
            yield
            return
        parameters_at = {p.untyped_storage().data_ptr() for p in parameters}
        held: dict[int, int] = {}  # bytes by address: views share theirs

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters_at:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self._per_position = sum(held.values()) / mb.tokens
