"""A whole model to one file and back. The suffix chooses the form: `.safetensors`, or torch.save's for anything else.

A file is written under another name and then renamed, so a crash while saving leaves the previous checkpoint whole.
"""

import importlib
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from telegrad.nn.whole_model import load_state_dict, state_dict


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Gather the model's state from all its owners and write it to `path`.

    Examples:
        >>> model = torch.nn.Sequential(RemoteModule("worker1", torch.nn.Linear, args=(2, 1)))
        >>> nn.save(model, "model.pt")
        >>> nn.restore(model, "model.pt")
        <All keys matched successfully>
    """
    _check_model(model, "save")
    target = Path(path)
    safetensors = _safetensors(target) if _is_safetensors(target) else None
    state = state_dict(model)
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        if safetensors is not None:
            safetensors.save_file(_tensors_only(state, target), beside)
        else:
            torch.save(state, beside)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def restore(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> Any:
    """Read `path` and give every module, here and on other workers, its part; returns what `load_state_dict` does.

    Examples:
        >>> model = torch.nn.Sequential(RemoteModule("worker1", torch.nn.Linear, args=(2, 1)))
        >>> nn.save(model, "model.pt")
        >>> nn.restore(model, "model.pt")
        <All keys matched successfully>
    """
    _check_model(model, "restore")
    source = Path(path)
    if _is_safetensors(source):
        state = _safetensors(source).load_file(source)
    else:
        state = torch.load(source, map_location="cpu", weights_only=True)
    return load_state_dict(model, state, strict=strict)


def _check_model(model: Any, what: str) -> None:
    if not isinstance(model, nn.Module):
        hint = "wrap what it refers to: a RemoteModule, or a model that has some" if hasattr(model, "to_here") else ""
        raise TypeError(
            f"nn.{what} takes a torch.nn.Module, which may have RemoteModules in it, and got {model!r}"
            + (f"; for a reference, {hint}" if hint else "")
        )


def _is_safetensors(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _safetensors(path: Path) -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as missing:
        raise ImportError(
            f"'{path.name}' asks for safetensors form, and the package safetensors is not installed here; install it, "
            "or use another suffix, such as .pt, for torch.save form"
        ) from missing


def _tensors_only(state: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    others = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise TypeError(
            f"'{path.name}' cannot hold {others}: safetensors form takes tensors only; "
            "use another suffix, such as .pt, for torch.save form"
        )
    # Copies: the form refuses tensors that share memory, as tied parameters do.
    return {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
