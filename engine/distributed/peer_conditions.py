"""The conditions under which ranks may use each other's memory: those of custom all-reduce v1.

One machine; GPUs that can access each other; and, for more than two ranks, NVLink between every
two, or KILN_ALL_REDUCE_PCIE=1. They are necessary: that the access works is proven afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kiln.engine.distributed.cuda_driver import DriverError, bindings, driver_call

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
# What connects the ranks.
HOST, ONE_GPU, NVLINK, PCIE = "shared memory", "one GPU", "NVLink", "PCIe"


def place_of(device: torch.device) -> dict[str, str]:
    """Return where a rank runs: its machine, and its GPU's PCI address, such as 0000:3b:00.0.

    On a CPU the address is "". Raises DriverError.
    """
    machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    pci = ""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        found = driver_call("cuDeviceGetPCIBusId", 32, driver_call("cuDeviceGet", index))
        pci = bytes(found).split(b"\0", 1)[0].decode()
    return {"machine": machine, "pci": pci}


def fabric_of(
    places: Sequence[Mapping[str, Any]], rank: int, *, allow_pcie: bool
) -> tuple[str, str]:
    """Return what connects the ranks, and why they cannot use each other's memory ("": they can).

    ``places``: what ``place_of`` returned on each rank.
    """
    machines = {place["machine"] for place in places}
    if len(machines) > 1 or "" in machines:
        return "", f"the {len(places)} ranks are on several machines"
    addresses = [place["pci"] for place in places]
    if not any(addresses):
        return HOST, ""
    if len({*addresses}) == 1:
        return ONE_GPU, ""
    try:
        return _fabric_of_gpus(addresses, rank, allow_pcie)
    except DriverError as error:
        return "", f"{error}, asked about peer access"


def _fabric_of_gpus(addresses: Sequence[str], rank: int, allow_pcie: bool) -> tuple[str, str]:
    own = _device_at(addresses[rank])
    slow = []
    for other, address in enumerate(addresses):
        if address == addresses[rank]:
            continue
        try:
            theirs = _device_at(address)
        except DriverError:
            return "", (
                f"rank {rank} does not see the GPU {address} of rank {other}: let "
                "CUDA_VISIBLE_DEVICES name all GPUs in every process"
            )
        if not int(driver_call("cuDeviceCanAccessPeer", own, theirs)):
            return "", f"GPU {addresses[rank]} has no access to {address} (rank {other})"
        if not _has_nvlink(own, theirs):
            slow.append(address)
    if slow and len(addresses) > 2 and not allow_pcie:
        return "", (
            f"{addresses[rank]} has no NVLink to {', '.join(slow)}, and {len(addresses)} ranks "
            "need it: KILN_ALL_REDUCE_PCIE=1 allows PCIe"
        )
    return (PCIE if slow else NVLINK), ""


def _has_nvlink(own: Any, theirs: Any) -> bool:
    """Whether two GPUs have more than PCIe between them: only then peers' atomics are native."""
    native = bindings().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(driver_call("cuDeviceGetP2PAttribute", native, own, theirs))


def _device_at(address: str) -> Any:
    return driver_call("cuDeviceGetByPCIBusId", address.encode())
