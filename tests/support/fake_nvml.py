"""NVML as a module of our own: what a driver would say of GPUs that are not here."""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

MIB = 2**20


class NVMLError(Exception):
    """What the library raises for everything that it cannot do."""


@dataclass
class Memory:
    total: int
    used: int
    free: int


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None


@dataclass
class Card:
    """A GPU. `memory` is None where the driver does not tell; sizes in MiB: total, used, free."""

    name: str = "NVIDIA H200"
    memory: tuple[int, int, int] | None = (143_771, 500, 142_000)
    uuid: str = "GPU-1234abcd-0000"
    processes: list[Process] = field(default_factory=list)


class FakeNvml(ModuleType):
    """Stands in `sys.modules["pynvml"]`. A method that is not here is one that the driver does not know."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, nvmlMemory_v2 = 1, 0, 2

    def __init__(self, *cards: Card, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.cards, self.driver = cards, driver
        self.begun = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def unknown(*args: Any, **options: Any) -> None:
            raise NVMLError(name)

        return unknown

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")
        self.begun += 1

    def nvmlShutdown(self) -> None:
        self.begun -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        if index >= len(self.cards):
            raise NVMLError("Invalid Argument")
        return self.cards[index]

    def nvmlDeviceGetIndex(self, card: Card) -> int:
        return self.cards.index(card)

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.124.06"

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int = 1) -> Memory:
        if card.memory is None:
            raise NVMLError("Not Supported")
        return Memory(*(size * MIB for size in card.memory))

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Process]:
        return card.processes
