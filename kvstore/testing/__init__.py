"""The public test kit: virtual time, a simulated engine and device, fault plans, page patterns.

Production code never imports it.
"""

from __future__ import annotations

from kvstore.testing.client import SimClient as SimClient
from kvstore.testing.completions import SimCompletions as SimCompletions
from kvstore.testing.device import SimDevice as SimDevice
from kvstore.testing.device import SimEvent as SimEvent
from kvstore.testing.device import SimStream as SimStream
from kvstore.testing.device import read_page as read_page
from kvstore.testing.device import write_page as write_page
from kvstore.testing.engine import SimEngine as SimEngine
from kvstore.testing.faults import Fault as Fault
from kvstore.testing.faults import FaultKind as FaultKind
from kvstore.testing.faults import FaultPlan as FaultPlan
from kvstore.testing.files import SimDisk as SimDisk
from kvstore.testing.files import SimFile as SimFile
from kvstore.testing.gate import SimGateWords as SimGateWords
from kvstore.testing.loop import SimClock as SimClock
from kvstore.testing.loop import SimDeadlock as SimDeadlock
from kvstore.testing.loop import SimLoop as SimLoop
from kvstore.testing.memory import SimMemory as SimMemory
from kvstore.testing.memory import memory_view as memory_view
from kvstore.testing.model import History as History
from kvstore.testing.model import ReferenceModel as ReferenceModel
from kvstore.testing.model import token_rows as token_rows
from kvstore.testing.pattern import check_pattern as check_pattern
from kvstore.testing.pattern import pattern as pattern
from kvstore.testing.store import SimRig as SimRig
from kvstore.testing.store import check_balances as check_balances
from kvstore.testing.store import open_sim_store as open_sim_store
from kvstore.testing.store import sim_config as sim_config
from kvstore.testing.traffic import Traffic as Traffic
from kvstore.testing.traffic import TrafficSpec as TrafficSpec

__all__ = [
    "Fault",
    "FaultKind",
    "FaultPlan",
    "History",
    "ReferenceModel",
    "SimClient",
    "SimClock",
    "SimCompletions",
    "SimDeadlock",
    "SimDevice",
    "SimDisk",
    "SimEngine",
    "SimEvent",
    "SimFile",
    "SimGateWords",
    "SimLoop",
    "SimMemory",
    "SimRig",
    "SimStream",
    "Traffic",
    "TrafficSpec",
    "check_balances",
    "check_pattern",
    "memory_view",
    "open_sim_store",
    "pattern",
    "read_page",
    "sim_config",
    "token_rows",
    "write_page",
]
