"""fastkern: skew-balanced all-to-all for mixture-of-experts layers over two-tier fabrics."""

from .communicator import Communicator
from .errors import (
    AgreementError,
    ClosedError,
    CompileError,
    DeadlineError,
    DeviceUnavailableError,
    FastkernError,
    HeapMemoryError,
    PeerLostError,
    WaitRecord,
)
from .ops import all_to_all_FAST, all_to_all_single, communicator_of, init, shutdown
from .stats import CallStats
from .trace import Trace, merge_traces
from .transports import Capabilities, Transport, shaped, shm
from .version import __version__
from .work import Work

__all__ = [
    "AgreementError",
    "CallStats",
    "Capabilities",
    "ClosedError",
    "Communicator",
    "CompileError",
    "DeadlineError",
    "DeviceUnavailableError",
    "FastkernError",
    "HeapMemoryError",
    "PeerLostError",
    "Trace",
    "Transport",
    "WaitRecord",
    "Work",
    "__version__",
    "all_to_all_FAST",
    "all_to_all_single",
    "communicator_of",
    "init",
    "merge_traces",
    "shaped",
    "shm",
    "shutdown",
]
