"""Checkpoints for training with several processes, with ``torch.distributed.checkpoint``.

Only checkpoints need this module: :func:`apo.attach` and :class:`apo.APO` take a network under
``DistributedDataParallel`` or ``fully_shard`` like any other. Each process writes its shards and the blocks that it
owns. Everything that belongs to a weight or a block is stored by name, so any number of processes can read the
checkpoint. With the same number, training resumes exactly; with another number, the other batch and the random number
generators, which belong to one process each, start again.
"""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from apo.distributed import are_several
from apo.loop.checkpoints import drop_summary
from apo.loop.tuner import Tuner
from apo.passes.isolation import RandomState
from apo.preconditioners import Layer, Preconditioner
from apo.torch_internals import uncompiled

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]

NamedTensors = dict[str, Tensor]
#: Tensors of which an optimizer keeps state, by name, for each optimizer.
Owners = dict[str, NamedTensors]


def save_checkpoint(tuner: Tuner, path: str | os.PathLike[str], *, extra: Any = None) -> None:
    """Save the network, the optimizer and what APO has learned; every process calls this.

    Args:
        tuner: What :class:`apo.APO` or :func:`apo.attach` returned.
        path: A new folder for this checkpoint, on a disk that all processes can access.
        extra: Your own plain data, such as the epoch, which :func:`load_checkpoint` returns; the first process's is
            saved.

    Example:
        >>> import apo, tempfile, warnings
        >>> model = nn.Linear(4, 3)
        >>> tuner = apo.APO(torch.optim.Adam(model.parameters()), model, torch.nn.functional.cross_entropy)
        >>> loss = tuner.step(torch.randn(8, 4), torch.randint(3, (8,)))
        >>> folder = tempfile.mkdtemp()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch warns that there is one process only
        ...     save_checkpoint(tuner, f"{folder}/step-1", extra={"epoch": 0})
        ...     load_checkpoint(tuner, latest_checkpoint(folder))
        {'epoch': 0}
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors, common = _named_state(tuner)
    rank, processes = _place()
    own = {"fsd_batches": tuner.fsd_batches.state_dict(), "random": RandomState.capture({tuner.device}).state_dict()}
    tensors[f"process/{rank}"] = _packed(own)
    if rank == 0:
        tensors["common"] = _packed(common | {"processes": processes, "extra": extra})
    # Buffers may differ between processes; DistributedDataParallel continues with those of the first.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save(tensors, checkpoint_id=os.fspath(path), planner=planner)


def load_checkpoint(tuner: Tuner, path: str | os.PathLike[str]) -> Any:
    """Resume from :func:`save_checkpoint`, with any number of processes; every process calls this.

    Args:
        tuner: Built like the saved one, with a network and an optimizer built like the saved ones.
        path: The folder.

    Returns:
        The ``extra`` that was saved.

    Raises:
        ValueError: The checkpoint lacks a tensor of the network or of the rule.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    saved: dict[str, Any] = dict(FileSystemReader(os.fspath(path)).read_metadata().state_dict_metadata)
    targets = _targets(tuner, saved)
    missing = sorted(set(targets) - set(saved))
    if missing:
        raise ValueError(
            f"path must be a checkpoint of this network and rule, got {os.fspath(path)} without {missing[0]!r} (one of "
            f"{len(missing)} missing entries): build the network, the optimizer and the rule as when it was saved"
        )
    rank, processes = _place()
    blobs = {
        key: torch.empty(saved[key].size, dtype=torch.uint8) for key in ("common", f"process/{rank}") if key in saved
    }
    load(targets | blobs, checkpoint_id=os.fspath(path))
    common = _unpacked(blobs["common"])
    own = _unpacked(blobs[f"process/{rank}"]) if common["processes"] == processes else None
    common["apo"]["fsd_batches"] = tuner.fsd_batches.state_dict() if own is None else own["fsd_batches"]
    tuner.optimizer.load_state_dict(_optimizer_state(tuner, targets, common))
    if own is not None:
        RandomState.from_state_dict(own["random"]).restore()
    return common["extra"]


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the latest complete checkpoint in ``folder``, or None; after a crash, resume from it.

    Example:
        >>> latest_checkpoint("no-such-folder") is None
        True
    """
    complete = Path(folder).glob("*/.metadata")  # written last, when all processes are done
    newest = max(complete, key=lambda file: file.stat().st_mtime_ns, default=None)
    return None if newest is None else newest.parent


def _place() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if are_several() else (0, 1)


def _named_state(tuner: Tuner) -> tuple[NamedTensors, dict[str, Any]]:
    """Split the state into tensors by name, and small data that is the same on all processes."""
    optimizer, own, owners = tuner.optimizer, tuner.optimizer.state_dict(), _owners(tuner)
    drop_summary(own["param_groups"])
    tensors: NamedTensors = _model_tensors(tuner.model)
    common = {"apo": {key: value for key, value in own.pop("apo").items() if key != "fsd_batches"}}
    common["optimizer"] = _split_state("optimizer", own, owners, tensors)
    if isinstance(optimizer, Preconditioner):
        tensors.update(_block_tensors(optimizer))
        rule = common["apo"]["rule"] = dict(common["apo"]["rule"])
        rule["meta_optimizer"] = _split_state("meta", rule["meta_optimizer"], owners, tensors)
        preconditioner = common["preconditioner"] = own["preconditioner"] | {"factors": None}
        if optimizer.warmup is not None:
            preconditioner["warmup"] = _split_state("warmup", preconditioner["warmup"], owners, tensors)
    return tensors, common


def _split_state(prefix: str, state: Mapping[str, Any], owners: Owners, tensors: NamedTensors) -> dict[str, Any]:
    """Move the tensors of an optimizer's state to ``tensors`` by name, and return the rest by name."""
    rest: dict[str, dict[str, Any]] = {}
    names = list(owners[prefix])
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}/{names[index]}/{key}"] = value
            else:
                rest.setdefault(names[index], {})[key] = value
    return {"state": rest, "param_groups": state["param_groups"]}


def _joined_state(prefix: str, rest: Mapping[str, Any], owners: Owners, tensors: NamedTensors) -> dict[str, Any]:
    """Undo :func:`_split_state`."""
    names = owners[prefix]
    state: dict[int, dict[str, Any]] = {i: dict(rest["state"][n]) for i, n in enumerate(names) if n in rest["state"]}
    indices = {f"{prefix}/{name}": index for index, name in enumerate(names)}
    for name, value in tensors.items():
        owner, _, key = name.rpartition("/")
        if owner in indices:
            state.setdefault(indices[owner], {})[key] = value
    return {"state": state, "param_groups": rest["param_groups"]}


def _optimizer_state(tuner: Tuner, tensors: NamedTensors, common: dict[str, Any]) -> dict[str, Any]:
    optimizer, own, owners = tuner.optimizer, {"apo": common["apo"]}, _owners(tuner)
    own |= _joined_state("optimizer", common["optimizer"], owners, tensors)
    if isinstance(optimizer, Preconditioner):
        factors = {layer.name: layer.block.tensors for layer in _own_layers(optimizer)}
        preconditioner = own["preconditioner"] = common["preconditioner"] | {"factors": factors}
        meta = _joined_state("meta", common["apo"]["rule"]["meta_optimizer"], owners, tensors)
        # The number of factors in the meta-optimizer's only group depends on the number of processes.
        (group,) = meta["param_groups"]
        meta["param_groups"] = [{**group, "params": list(range(max(len(owners["meta"]), 1)))}]
        common["apo"]["rule"]["meta_optimizer"] = meta
        if optimizer.warmup is not None:
            preconditioner["warmup"] = _joined_state("warmup", preconditioner["warmup"], owners, tensors)
    return own


def _targets(tuner: Tuner, saved: Mapping[str, Any]) -> NamedTensors:
    """Return the tensors to load into: those of the network and the factors in place, new ones for the rest."""
    targets = _model_tensors(tuner.model)
    if isinstance(tuner.optimizer, Preconditioner):
        targets.update(_block_tensors(tuner.optimizer))
    owners = {f"{prefix}/{name}": owner for prefix, named in _owners(tuner).items() for name, owner in named.items()}
    for name, stored in saved.items():
        owner, _, key = name.rpartition("/")
        if owner in owners:
            like, dtype = owners[owner].detach(), stored.properties.dtype
            same = stored.size == like.shape and key != "step"  # a step count is on the host
            targets[name] = torch.zeros_like(like, dtype=dtype) if same else torch.zeros(stored.size, dtype=dtype)
    return targets


def _owners(tuner: Tuner) -> Owners:
    """Return what optimizers keep state of, by name, for each optimizer: weights, or factors of the meta-optimizer."""
    optimizer = tuner.optimizer
    found = {"optimizer": _named_parameters(tuner.model, optimizer)}
    if isinstance(optimizer, Preconditioner):
        own = _own_layers(optimizer)
        found["meta"] = {f"{layer.name}/{key}": t for layer in own for key, t in layer.block.factors.items()}
        if optimizer.warmup is not None:
            found["warmup"] = _named_parameters(tuner.model, optimizer.warmup)
    return found


def _model_tensors(model: nn.Module) -> NamedTensors:
    state = _unwrapped(model).state_dict()
    return {f"model/{name}": value for name, value in state.items() if isinstance(value, Tensor)}


def _packed(data: Any) -> Tensor:
    """Serialise plain data to bytes, because ``torch.distributed.checkpoint`` would pickle every item separately."""
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(ctypes.string_at(data.data_ptr(), data.numel())), weights_only=True)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the network inside ``torch.compile`` and ``DistributedDataParallel``.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> _unwrapped(nn.DataParallel(model)) is model
        True
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif (inside := uncompiled(model)) is not model:
            model = inside
        else:
            return model


def _named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's parameters by name, in its order; those not in the network are numbered.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> list(_named_parameters(nn.DataParallel(model), torch.optim.SGD(model.parameters(), lr=1.0)))
        ['weight', 'bias']
    """
    names = {id(p): name for name, p in _unwrapped(model).named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {names.get(id(p), f"unnamed.{index}"): p for index, p in enumerate(parameters)}


def _own_layers(optimizer: Preconditioner) -> list[Layer]:
    """Return the layers whose blocks this process keeps."""
    return [layer for layer in optimizer.layers if optimizer.ownership.is_mine(layer)]


def _block_tensors(optimizer: Preconditioner) -> NamedTensors:
    """Return the factors and statistics that this process keeps, by name.

    Example:
        >>> from apo import Diagonal
        >>> list(_block_tensors(Diagonal(nn.Linear(2, 2))))
        ['factors/weight/s', 'factors/bias/s']
    """
    own = _own_layers(optimizer)
    return {f"factors/{layer.name}/{key}": tensor for layer in own for key, tensor in layer.block.tensors.items()}
