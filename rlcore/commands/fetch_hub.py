"""`rlcore fetch OWNER/NAME`: a model or data set of the Hugging Face Hub, into the local cache,
where model=OWNER/NAME and data=OWNER/NAME find it, or into a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.files import HUB_NAME, refusal
from rlcore.progress import ProgressLine
from rlcore.spec import refuse

KINDS = ("model", "dataset")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# Weights in formats that rlcore does not load, beside those in safetensors.
UNUSED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.gguf")
UNUSED_FOLDERS = ("onnx/*", "original/*", "openvino/*", "coreml/*")
CUTS = 5  # connections that may be lost one after the other
PAUSE_S = 2.0  # before the first of them is followed by another; it doubles


@dataclass(frozen=True, slots=True)
class Wanted:
    """A repository of the Hub. `kind`: None: a model, or a data set where no model has the name."""

    name: str
    kind: str | None
    revision: str | None = None
    out: str | None = None


def fetch_repository(wanted: Wanted) -> Path:
    """Download the repository, and return its folder. Files that are there already are kept. A file
    whose connection is closed goes on near the place; after a reset, or in another command, it
    begins anew.

    Raises UserError for a name that the Hub does not have or does not show, without a connection,
    and for a connection that is cut again and again.
    """
    name = wanted.name
    refuse(
        HUB_NAME.fullmatch(name) is None,
        f"{name} is not accepted: give OWNER/NAME of the Hugging Face Hub.",
    )
    refuse(
        wanted.revision is not None and wanted.out is None,
        f"revision={wanted.revision} needs its own folder: add out=FOLDER, since "
        f"model={name} and data={name} read the newest that was fetched.",
    )
    with _sentences(name):
        kind, files = _found(wanted)
        folder = _downloaded(wanted, kind, files)
    word = "model" if kind == "model" else "data"
    print(f"{kind} {name} is in {folder}: {word}={wanted.out or name}", flush=True)
    return folder


def _found(wanted: Wanted) -> tuple[str, list[str]]:
    """The kind of the repository, and its files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what ends the command is one sentence
    kinds = KINDS if wanted.kind is None else (wanted.kind,)
    for kind in kinds:
        try:
            files = HfApi().list_repo_files(
                wanted.name, repo_type=kind, revision=wanted.revision or "main"
            )
            return kind, files
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            if kind == kinds[-1]:
                raise
    raise AssertionError


def _downloaded(wanted: Wanted, kind: str, files: list[str]) -> Path:
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    weights = kind == "model" and any(file.endswith(".safetensors") for file in files)
    ignored = [*UNUSED_FOLDERS, *(UNUSED if weights else ())] if kind == "model" else []
    cuts = 0
    while True:
        progress = ProgressLine(f"fetch {wanted.name}", "MB")
        try:
            folder = snapshot_download(
                wanted.name,
                repo_type=kind,
                revision=wanted.revision or "main",
                local_dir=wanted.out,
                ignore_patterns=ignored,
                max_workers=4,
                tqdm_class=_bar(progress),
            )
            break
        except HfHubHTTPError:
            raise
        except (httpx2.TransportError, OSError) as error:
            cuts += 1
            if cuts > CUTS or getattr(error, "errno", None) is not None:  # such as a full disk
                raise
            time.sleep(PAUSE_S * 2 ** (cuts - 1))
        finally:
            progress.close()
    if wanted.out is not None:
        _without_notes(Path(wanted.out))
    return Path(folder)


def _without_notes(folder: Path) -> None:
    """Remove the notes of a download, which exports would copy; other caches of the folder stay."""
    notes = folder / ".cache" / "huggingface"
    shutil.rmtree(notes, ignore_errors=True)
    if notes.parent.is_dir() and not any(notes.parent.iterdir()):
        notes.parent.rmdir()


class _Nowhere:
    """The file of a bar that prints nothing by itself."""

    def write(self, text: str) -> None:
        """Leave the text out."""

    def flush(self) -> None:
        """Nothing is kept."""


def _bar(progress: ProgressLine) -> type[Any]:
    """A bar for huggingface_hub, whose bytes on disk go to `progress`."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # of a thread that would outlive the download

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings | {"file": _Nowhere()})

        def close(self) -> None:
            """Print nothing more, whenever it is collected."""

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if str(self.desc).startswith("Reconstruct"):
                progress.show(self.n, self.total)

    return Bar


@contextlib.contextmanager
def _sentences(name: str) -> Iterator[None]:
    """Errors of the Hub as one sentence each."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, offline = constants.ENDPOINT, [key for key in OFFLINE if os.environ.get(key)]
    again = f"finished files are kept: rlcore fetch {name} goes on with the others"
    try:
        if constants.is_offline_mode():
            raise UserError(
                f"rlcore fetch {name} needs the Hugging Face Hub, and "
                f"{offline[0] if offline else OFFLINE[0]} is set in this environment: unset it, or "
                "copy the folder to this machine and name it with model= or data=."
            )
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{name} is gated: accept its terms on {hub}/{name}, and set HF_TOKEN to a token of "
            "that account."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{hub} shows no repository {name}: check the name, and set HF_TOKEN if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} at {hub} has no such revision: leave revision= out.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise UserError(f"{hub} answers status {status} for {name}; {again}.") from error
    except (httpx2.ConnectError, httpx2.TimeoutException) as error:
        raise UserError(
            f"{hub} cannot be reached ({type(error).__name__}): this machine may have no network; "
            f"set HF_ENDPOINT to a mirror, or copy the folder of {name} here and name it with "
            f"model= or data=; {again}."
        ) from error
    except httpx2.HTTPError as error:
        raise UserError(f"the connection to {hub} was cut {CUTS + 1} times; {again}.") from error
    except OSError as error:
        if error.errno is not None:
            raise UserError(f"rlcore fetch {name}: {refusal(error)}; {again}.") from error
        raise UserError(f"the connection to {hub} was cut {CUTS + 1} times; {again}.") from error
