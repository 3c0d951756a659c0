"""kvstore: an asyncio-native, tiered store for the KV-cache pages of LLM serving.

What is listed in ``__all__`` is public; everything else may change without notice.
"""

from __future__ import annotations

from kvstore import compiled as compiled  # first: it decides in which form the core is imported
from kvstore.config import DeviceTierConfig as DeviceTierConfig
from kvstore.config import DiskTierConfig as DiskTierConfig
from kvstore.config import HostTierConfig as HostTierConfig
from kvstore.config import IoConfig as IoConfig
from kvstore.config import PoolGroupConfig as PoolGroupConfig
from kvstore.config import StoreConfig as StoreConfig
from kvstore.config import Tier as Tier
from kvstore.errors import BusyError as BusyError
from kvstore.errors import CapacityError as CapacityError
from kvstore.errors import ConfigError as ConfigError
from kvstore.errors import DeadlineError as DeadlineError
from kvstore.errors import DeviceError as DeviceError
from kvstore.errors import EngineError as EngineError
from kvstore.errors import FormatError as FormatError
from kvstore.errors import GateBusy as GateBusy
from kvstore.errors import InvariantError as InvariantError
from kvstore.errors import KVStoreError as KVStoreError
from kvstore.errors import LogicError as LogicError
from kvstore.errors import OutOfPages as OutOfPages
from kvstore.errors import PagesLost as PagesLost
from kvstore.errors import StalePlan as StalePlan
from kvstore.errors import StaleSlot as StaleSlot
from kvstore.errors import StoreClosed as StoreClosed
from kvstore.errors import StoreFailed as StoreFailed
from kvstore.errors import TransferError as TransferError
from kvstore.errors import UnsupportedError as UnsupportedError
from kvstore.errors import WouldBlock as WouldBlock
from kvstore.gate import Gate as Gate
from kvstore.gate import GateTicket as GateTicket
from kvstore.session import Prefetch as Prefetch
from kvstore.session import Restore as Restore
from kvstore.session import RestoreEstimate as RestoreEstimate
from kvstore.session import Session as Session
from kvstore.stats import StoreStats as StoreStats
from kvstore.store import Health as Health
from kvstore.store import KVEvent as KVEvent
from kvstore.store import KVStore as KVStore
from kvstore.store import Probe as Probe
from kvstore.store import open_store as open_store

__all__ = [
    "BusyError",
    "CapacityError",
    "ConfigError",
    "DeadlineError",
    "DeviceError",
    "DeviceTierConfig",
    "DiskTierConfig",
    "EngineError",
    "FormatError",
    "Gate",
    "GateBusy",
    "GateTicket",
    "Health",
    "HostTierConfig",
    "InvariantError",
    "IoConfig",
    "KVEvent",
    "KVStore",
    "KVStoreError",
    "LogicError",
    "OutOfPages",
    "PagesLost",
    "PoolGroupConfig",
    "Prefetch",
    "Probe",
    "Restore",
    "RestoreEstimate",
    "Session",
    "StalePlan",
    "StaleSlot",
    "StoreClosed",
    "StoreConfig",
    "StoreFailed",
    "StoreStats",
    "Tier",
    "TransferError",
    "UnsupportedError",
    "WouldBlock",
    "open_store",
]
