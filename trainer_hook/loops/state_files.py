"""The state of named objects (model, optimizer, scheduler, …) as files of one checkpoint, and back.

| state | file |
| --- | --- |
| tensors by name | ``<name>.safetensors``; ``<name>.pt`` where safetensors is not installed, or cannot hold them |
| anything else | ``<name>.pt`` |
| sharded over ranks (``fully_shard``, FSDP, DTensor) | ``sharded/``, by ``torch.distributed.checkpoint`` |

All files are read with ``weights_only=True``: a checkpoint cannot run code.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_hook.asynchronous.deferring import deferred_here
from trainer_hook.saving.readable import Load, readable
from trainer_hook.saving.readable import StateMismatch as StateMismatch

SHARDED = "sharded"


def collect(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the replicated and the sharded state of the objects, by name. Collective.

    The tensors are not copied.
    """
    replicated, sharded = {}, {}
    for name, thing in objects.items():
        if _is_sharded(thing, objects):
            has_none = isinstance(thing, torch.optim.Optimizer) and not thing.state
            sharded[name] = _sharded_state(thing, objects)
            if has_none:  # it has made no step yet: torch has just made one with gradients of zero, which Adam would count
                thing.state.clear()
                sharded[name]["state"] = {}
        else:
            replicated[name] = _bare(thing).state_dict()
    return replicated, sharded


def write(state: tuple[Mapping[str, Any], Mapping[str, Any]], folder: Path, *, rank: int, group: Any) -> None:
    """Write what ``collect`` returned. Collective.

    Rank 0 writes the replicated state, every rank its own shards. ``group``: a process group for CPU tensors; ``None``: a
    single process. Inside ``asynchronous.deferring`` nothing else may use it until all files are written.

    Raises:
        OSError: The volume is full or not writable.
        RankFailed: Another rank could not write its part.
        StateMismatch: A state holds an object that could not be read again.
    """
    replicated, sharded = state
    if sharded:  # first: after an error of the part below, the other ranks would wait in this collective
        from trainer_hook.asynchronous import sharded as shards

        shards.save(sharded, folder / SHARDED, group, deferred_here())
    if rank == 0:
        for name, content in replicated.items():
            if (tensors := _for_safetensors(content)) is None:
                write_pt(content, folder / f"{name}.pt")
            else:
                import safetensors.torch

                safetensors.torch.save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})


def load(objects: Mapping[str, Any], folder: Path, *, group: Any) -> None:
    """Load each object's state from a checkpoint. Collective.

    Raises ``StateMismatch``: the checkpoint is of other objects, or holds objects that cannot be read safely.
    """
    sharded = {name: thing for name, thing in objects.items() if _is_sharded(thing, objects)}
    for name, thing in objects.items():
        if name not in sharded:
            content = _read(folder, name)
            try:
                _bare(thing).load_state_dict(content)
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateMismatch(f"{folder.name}: the state of {name!r} does not fit: {error}. {_OTHER_RUN}") from error
    if sharded:
        _load_sharded(sharded, objects, folder / SHARDED, group)


def replicated(objects: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Any], Load]]:
    """Yield the replicated states, for ``unreadable``."""
    for name, thing in objects.items():
        if not _is_sharded(thing, objects):
            yield name, _bare(thing).state_dict, load_pt


def is_sharded(objects: Mapping[str, Any]) -> bool:
    """Whether any object is sharded over ranks."""
    return any(_is_sharded(thing, objects) for thing in objects.values())


def reads_own_shards(objects: Mapping[str, Any], world_size: int) -> bool:
    """Whether each rank needs only its own shards and the files of rank 0.

    True if every parameter is sharded over all ranks in one dimension, as by ``fully_shard`` with one mesh. Rank 0 then holds
    replicated data (``dedup_save_to_lowest_rank``); with more dimensions other ranks may.
    """
    models = [thing for thing in objects.values() if isinstance(thing, torch.nn.Module) and _is_sharded(thing, objects)]
    if not models:
        return True
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None or any(_has_fsdp(model) for model in models):
        return False
    values = [value for model in models for value in (*model.parameters(), *model.buffers())]
    return all(
        not isinstance(value, tensor.DTensor) or (value.device_mesh.ndim == 1 and value.device_mesh.size() == world_size)
        for value in values
    )


def _has_fsdp(model: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported if anything is sharded; the import takes seconds
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules())


_OTHER_RUN = "Another run needs a CKPT_STORE prefix of its own"


def _bare(thing: Any) -> Any:
    """Return the module inside DistributedDataParallel and torch.compile, whose names do not depend on them."""
    while isinstance(thing, torch.nn.Module):
        if isinstance(thing, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            thing = thing.module
        elif (compiled := getattr(thing, "_orig_mod", None)) is not None:
            thing = compiled
        else:
            break
    return thing


def _is_sharded(thing: Any, objects: Mapping[str, Any]) -> bool:
    if isinstance(thing, torch.optim.Optimizer):
        model = _model_of(thing, objects)
        return model is not None and _is_sharded(model, objects)
    if not isinstance(thing, torch.nn.Module):
        return False
    tensor = sys.modules.get("torch.distributed.tensor")
    return _has_fsdp(thing) or (tensor is not None and any(isinstance(p, tensor.DTensor) for p in thing.parameters()))


def _model_of(optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> Any:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    models = (thing for thing in objects.values() if isinstance(thing, torch.nn.Module))
    return next((model for model in models if any(id(parameter) in own for parameter in model.parameters())), None)


def _sharded_state(thing: Any, objects: Mapping[str, Any]) -> Any:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    if isinstance(thing, torch.optim.Optimizer):
        return get_optimizer_state_dict(_model_of(thing, objects), thing)
    return get_model_state_dict(thing)


def _load_sharded(sharded: Mapping[str, Any], objects: Mapping[str, Any], folder: Path, group: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    from trainer_hook.asynchronous.sharded import alone_as_told

    state = {name: _sharded_state(thing, objects) for name, thing in sharded.items()}
    optimizers = {name: thing for name, thing in sharded.items() if isinstance(thing, torch.optim.Optimizer)}
    parameters = {name: _parameters_by_name(thing, state[name]) for name, thing in optimizers.items()}
    fresh: dict[str, dict[str, Any]] = {}
    try:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name in optimizers:
            fresh[name] = _without_state(name, state[name], saved)
            state[name]["state"] = {key: value for key, value in state[name]["state"].items() if key not in fresh[name]}
        dcp.load(state, checkpoint_id=folder, process_group=group, **alone_as_told(dcp.load))
    except (Exception, dcp.api.CheckpointException) as error:  # CheckpointException is a BaseException
        raise StateMismatch(f"{folder.parent.name}: {str(error)[:500]}. {_OTHER_RUN}") from error
    for name, thing in sharded.items():
        if name in optimizers:
            state[name]["state"] |= fresh[name]  # torch wants a state of each
            set_optimizer_state_dict(_model_of(thing, objects), thing, state[name])
            for key in fresh[name]:
                thing.state.pop(parameters[name][key], None)
        else:
            set_model_state_dict(thing, state[name])


def _parameters_by_name(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {name: p for named, own in groups for name, p in zip(named["params"], own["params"], strict=False)}


def _without_state(name: str, state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the initial states of the parameters of which a checkpoint has none: they have had no gradient yet.

    ``state``: of an optimizer, with a state of each. ``saved``: by the keys of the checkpoint.
    """
    keys = sorted(saved)

    def has(prefix: str) -> bool:
        at = bisect.bisect_left(keys, prefix)
        return at < len(keys) and keys[at].startswith(prefix)

    return {key: value for key, value in state["state"].items() if value and not has(f"{name}.state.{key}.")}


def _for_safetensors(content: Any) -> dict[str, Any] | None:
    """Return the tensors that safetensors would write for a state; ``None``: it cannot hold it."""
    if not isinstance(content, Mapping) or not content:
        return None
    if not all(isinstance(key, str) and type(value) in (torch.Tensor, torch.nn.Parameter) for key, value in content.items()):
        return None
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        return None
    tensors = {key: value.detach() for key, value in content.items()}
    tensors = {key: value.contiguous() if value.layout is torch.strided else value for key, value in tensors.items()}
    return tensors if refused_by_safetensors(tensors) is None else None


def fits_safetensors(model: torch.nn.Module) -> bool:
    """Whether safetensors writes all types of tensors that a model has."""
    return all(_holds(value.dtype) for value in (*model.parameters(), *model.buffers()))


def of_odd_type(tensors: Mapping[str, Any]) -> str | None:
    """Return which tensor is of a type that safetensors does not write; ``None``: none is."""
    return next((f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not _holds(tensor.dtype)), None)


def refused_by_safetensors(tensors: Mapping[str, Any]) -> str | None:
    """Return why safetensors would not write tensors by name; ``None``: it does."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            return f"{name} is {'sparse' if tensor.layout is not torch.strided else 'not contiguous'}"
        if tensor.is_conj() or tensor.is_neg() or not _holds(tensor.dtype):
            return f"{name} is {tensor.dtype}"
    areas = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items())
    for (device, _, end, one), (its_device, begin, _, other) in itertools.pairwise(areas):
        if device == its_device and begin < end:
            return f"{one} and {other} share memory"
    return None


@functools.cache
def _holds(dtype: torch.dtype) -> bool:
    """Whether safetensors writes and reads tensors of a type."""
    from safetensors.torch import load, save

    try:
        return bool(load(save({"x": torch.empty(1, dtype=dtype)}))["x"].dtype == dtype)
    except Exception:  # of each missing type another one
        return False


_ALLOWED = [bytes, complex, dict, OrderedDict, defaultdict, Counter, list, tuple, set, frozenset]
"""What ``torch.load`` may make of a file: some of these it refuses without being told, PyTorch 2.5 also sets."""


def _read(folder: Path, name: str) -> Any:
    if (folder / f"{name}.safetensors").is_file():
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise StateMismatch(f"{folder.name}/{name}.safetensors needs safetensors: pip install safetensors") from None
        return load_file(folder / f"{name}.safetensors")
    return read_pt(folder / f"{name}.pt")


def write_pt(content: Any, path: Path) -> None:
    """Write a file for ``read_pt``. Raises ``StateMismatch``: as ``readable``."""
    torch.save(readable(content, path.stem, load_pt), path)


def read_pt(path: Path) -> Any:
    """Read a file of ``write_pt``. Raises ``StateMismatch``: it is missing, or holds objects of unsafe classes."""
    try:
        return load_pt(path)
    except FileNotFoundError:
        raise StateMismatch(f"{path.parent.name} has no state of {path.stem!r}. {_OTHER_RUN}") from None
    except pickle.UnpicklingError as error:
        remedy = "allow its classes with torch.serialization.add_safe_globals"
        raise StateMismatch(f"{path.parent.name}/{path.name} is not read without running code: {remedy}: {error}") from error


def load_pt(file: Any) -> Any:
    """Read a file of ``torch.save``, given as a path or an open file, with tensors on the CPU."""
    with torch.serialization.safe_globals(_ALLOWED):
        return torch.load(file, map_location="cpu", weights_only=True)
