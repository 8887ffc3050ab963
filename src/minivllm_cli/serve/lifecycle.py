"""From a loaded model to a server that listens, and its two ways down."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from minivllm_cli.console.streams import Console
from minivllm_cli.errors import CliError, EngineDied
from minivllm_cli.serve.engine_thread import EngineStopped, EngineThread
from minivllm_cli.serve.metrics import Metrics
from minivllm_cli.serve.routes import make_app
from minivllm_cli.serve.service import Limits, Service

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Options:
    """Where and for whom to serve; see the flags of `serve`."""

    host: str
    port: int
    names: Sequence[str]
    keys: Sequence[str]
    limits: Limits
    shutdown_timeout: float
    max_tokens: int | None

    @property
    def loopback(self) -> bool:
        """No other machine can connect."""
        return self.host in _LOOPBACK


def listen(host: str, port: int) -> socket.socket:
    """Open the socket. Port 0 takes one that is free.

    Raises:
        CliError: the address cannot be used.
    """
    opened = None
    if not 0 <= port <= 65535:
        raise CliError(
            f"cannot listen on {host}:{port}: ports are 0 to 65535", hint="another --port"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol said: asyncio sets TCP_NODELAY only then, and without it a token waits 40 ms.
        opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(2048)
    except OSError as error:
        if opened is not None:
            opened.close()
        what = error.strerror or str(error)
        raise CliError(f"cannot listen on {host}:{port}: {what}", hint="another --port") from None
    return opened


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to us: uvicorn would raise them again when it is done."""
        yield


def serve(llm: "LLM", options: Options, opened: socket.socket, console: Console) -> None:
    """Serve until a signal comes.

    Raises:
        EngineDied: the engine failed.
    """
    asyncio.run(_serve(llm, options, opened, console))


async def _serve(llm: "LLM", options: Options, opened: socket.socket, console: Console) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    metrics = Metrics(options.names[0])
    engine = EngineThread(llm, loop, on_end=metrics.end, on_death=lambda _: stop.set())
    service = Service(
        engine,
        llm.tokenizer,
        names=options.names,
        limits=options.limits,
        max_model_len=llm.max_model_len,
        max_tokens=options.max_tokens,
    )
    app = make_app(service, metrics, keys=options.keys, loopback=options.loopback)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    at_once = asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()
        if not at_once.is_set():
            console.note(f"finishing {engine.num_unfinished} requests; again to leave at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    running = asyncio.ensure_future(server.serve(sockets=[opened]))
    port = opened.getsockname()[1]
    console.note(f"serving {options.names[0]} on http://{_in_url(options.host)}:{port}")
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    service.draining = True
    await _drain(engine, at_once, options.shutdown_timeout)
    engine.abort_all(EngineStopped("the server is going down"))
    server.should_exit = True
    await running
    await engine.close()
    service.close()
    if engine.failure is not None:
        raise EngineDied(f"the engine failed: {engine.failure}") from engine.failure


async def _drain(engine: EngineThread, at_once: asyncio.Event, seconds: float) -> None:
    """Let what runs come to its end, for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while engine.num_unfinished and not at_once.is_set():
                await asyncio.sleep(_POLL_SECONDS)
            if not at_once.is_set():
                await asyncio.sleep(2 * _POLL_SECONDS)  # what has ended is still being sent


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
