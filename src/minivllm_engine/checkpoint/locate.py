"""Which checkpoint a MODEL argument means: `demo`, a path, or an id in the local Hugging Face cache."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from minivllm_engine.checkpoint.safetensors_header import LFS_POINTER, git_lfs_pointer
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.suggest import suggest

_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_PREFIX = "models--"
_MOST_BESIDE = 200  # entries of a directory that are looked at for a name
# Small files of a model, which Git LFS may hold back as well as large ones.
_SMALL = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def locate(model: str | Path) -> Path:
    """Find the checkpoint that `model` means; nothing is downloaded. It may be a file.

    Args:
        model: "demo" for the model in this package; a path, `~` and links followed; the root of a model in a
            Hugging Face cache (`models--org--name`), or its id `org/name`: its snapshot `refs/main`.

    Raises:
        CheckpointError: there is no such thing on this machine; says what to do about it.
    """
    if str(model) == "demo":
        return Path(__file__).parents[1] / "demo"
    path = expanded(Path(model))
    try:
        path.stat()
    except FileNotFoundError:
        if not path.is_symlink():
            return _from_cache(str(model), path)
        raise _unreadable(
            path, f"it is a link to {os.readlink(path)}, which is not there"
        ) from None
    except (OSError, ValueError) as error:
        link = f": it is a link to {os.readlink(path)}" if path.is_symlink() else ""
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(path, f"{reason}{link}") from None
    if path.name.startswith(_PREFIX) and (path / "snapshots").is_dir():
        return _snapshot(path)
    return path


def hub_cache() -> Path:
    """Say where Hugging Face's libraries keep what they download."""
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(key):
            return expanded(Path(os.environ[key]))
    if os.environ.get("HF_HOME"):
        return expanded(Path(os.environ["HF_HOME"])) / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(Path(cache)) / "huggingface" / "hub"


def local_checkpoints() -> list[str]:
    """List the ids of models in the local Hugging Face cache that have a snapshot with a config.json."""
    return sorted(_cached(hub_cache()))


def refuse_what_is_no_model(path: Path, names: list[str]) -> None:
    """Refuse a directory that holds an adapter or a GGUF file in the place of a model.

    Args:
        names: of what is in `path`.

    Raises:
        CheckpointError: it does, or one of its small files is a Git LFS pointer.
    """
    if "adapter_config.json" in names and "config.json" not in names:
        raise CheckpointError(
            f"{path} holds a LoRA adapter, not a model",
            why="adapter_config.json is there and no config.json: it changes a base model that is elsewhere",
            hint="Merge it first, with PEFT: model.merge_and_unload().save_pretrained(DIR).",
        )
    gguf = [name for name in names if name.endswith(".gguf")]
    weights = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
    if gguf and not any(name.endswith(weights) for name in names):
        raise gguf_file(path / gguf[0])
    for name in _SMALL:
        if name in names and (path / name).is_file():
            with (path / name).open("rb") as stream:
                if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                    raise git_lfs_pointer(path / name)


def gguf_file(file: Path) -> CheckpointError:
    """Make the error for a file of llama.cpp."""
    return CheckpointError(
        f"{file} is a GGUF file",
        why="its weights are quantised and renamed",
        hint="Convert the Hugging Face checkpoint that it was made from.",
    )


def expanded(path: str | Path) -> Path:
    """Put the home directory in the place of `~`; the home of nobody stays as it was typed."""
    return Path(os.path.expanduser(path))


def _cached(cache: Path) -> Iterator[str]:
    try:
        roots = list(cache.glob(f"{_PREFIX}*--*"))
    except OSError:
        return
    for root in roots:
        if any(root.glob("snapshots/*/config.json")):
            yield root.name.removeprefix(_PREFIX).replace("--", "/", 1)


def _beside(path: Path) -> list[str]:
    """Models that lie where `path` would."""
    try:
        found = sorted(path.absolute().parent.iterdir())[:_MOST_BESIDE]
    except OSError:
        return []
    return [str(path.with_name(e.name)) for e in found if (e / "config.json").is_file()]


def _from_cache(model: str, path: Path) -> Path:
    cache = hub_cache()
    is_id = _ID.fullmatch(model) is not None
    if is_id:
        root = cache / (_PREFIX + model.replace("/", "--"))
        if root.is_dir():
            return _snapshot(root)
    known = ["demo", *_beside(path), *local_checkpoints()]
    near = suggest(model, known)
    hint = "Nothing is downloaded: give the path of a checkpoint on this machine, or demo."
    if is_id:
        # What is near may be another size of the same model.
        hint = f"Nothing is downloaded. To have it in the cache: hf download {model}"
        hint += f"; or did you mean {near}?" if near else ""
    elif near:
        hint = f"Did you mean {near}?"
    where = f", and none in {cache} has that id" if is_id else ""
    raise CheckpointError(
        f"{escape(model)} does not exist",
        why=f"{_as_far_as(path)}{where}; known are {listed(known)}",
        hint=hint,
    )


def _snapshot(root: Path) -> Path:
    """The snapshot of a model in a cache that `refs/main` names, or the only one."""
    name = root.name.removeprefix(_PREFIX).replace("--", "/", 1)
    try:
        revision = (root / "refs" / "main").read_text(encoding="utf-8").strip()
        found = [root / "snapshots" / revision] if revision.isalnum() else []
    except (OSError, ValueError):
        snapshots = root / "snapshots"
        found = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
    if len(found) == 1 and found[0].is_dir():
        return found[0]
    if len(found) > 1:
        raise CheckpointError(
            f"{root} holds {len(found)} snapshots and no refs/main",
            why="nothing says which of them is meant: " + listed(path.name for path in found),
            hint=f"Give one of them: {shlex.quote(str(found[-1]))}",
        )
    raise CheckpointError(
        f"{root} holds no snapshot of the model",
        why="refs/main names none that is there: the download was not finished",
        hint=f"Nothing is downloaded. To have it in the cache: hf download {name}",
    )


def _unreadable(path: Path, why: str) -> CheckpointError:
    hint = "See that it is there in full and that you may read it."
    return CheckpointError(f"{escape(path)} cannot be read", why=why, hint=hint)


def _as_far_as(path: Path) -> str:
    """How much of a path is there."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    missing = path.absolute().relative_to(parent).parts[0]
    return f"{parent} is there, and holds no {escape(missing)}"
