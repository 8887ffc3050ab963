"""The server's application with a scripted engine: limits, hang-ups at every stage, a dying engine."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from minivllm_cli.config.settings import resolve_settings
from minivllm_cli.serve.engine_thread import EngineStopped, EngineThread
from minivllm_cli.serve.metrics import Metrics
from minivllm_cli.serve.routes import make_app
from minivllm_cli.serve.service import Limits, Service
from support.fake_llm import FakeLLM, Pace

JSON = {"content-type": "application/json"}


class Rig:
    """A server without sockets."""

    def __init__(self, model: Path, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        settings = resolve_settings(
            files=[], assignments=["engine.max_num_seqs=2"], flags={}, environ={}
        )
        self.llm = FakeLLM(settings, model, options.pop("pace", Pace(step=0.002, tokens=1)))
        self.metrics = Metrics("fake")
        self.deaths: list[BaseException] = []
        self.engine = EngineThread(
            self.llm, loop, on_end=self.metrics.end, on_death=self.deaths.append
        )
        limits = Limits(options.pop("body", 10_000), options.pop("waiting", 4))
        self.service = Service(
            self.engine,
            self.llm.tokenizer,
            names=["fake"],
            limits=limits,
            max_model_len=self.llm.max_model_len,
            max_tokens=None,
        )
        self.app = make_app(self.service, self.metrics, loopback=False, **options)

    def http(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://x", timeout=30)

    async def is_idle(self) -> bool:
        """Nothing runs any more, in the engine too."""
        for _ in range(200):
            if not self.engine.num_unfinished and not self.llm.has_unfinished:
                return True
            await asyncio.sleep(0.01)
        return False


def served(model: Path, body: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        rig = Rig(model, asyncio.get_running_loop(), **options)
        try:
            await asyncio.wait_for(body(rig), 60)
        finally:
            await rig.engine.close()
            rig.service.close()

    asyncio.run(main())


def chat(script: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": script}], **more}


def events(text: str) -> list[Any]:
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def test_reasoning_is_told_apart_in_both_forms(fake_model: Path) -> None:
    async def body(rig: Rig) -> None:
        script = chat("think hm | yes", max_tokens=100, enable_thinking=True)
        async with rig.http() as http:
            whole = (await http.post("/v1/chat/completions", json=script)).json()
            message = whole["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
            streamed = await http.post("/v1/chat/completions", json={**script, "stream": True})
            assert streamed.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(streamed.text)
        assert done == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "yes"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    served(fake_model, body)


def test_a_failing_request_costs_itself_alone(fake_model: Path) -> None:
    async def body(rig: Rig) -> None:
        async with rig.http() as http:
            good = asyncio.ensure_future(
                http.post("/v1/chat/completions", json=chat("say fine", max_tokens=50))
            )
            bad = await http.post("/v1/chat/completions", json=chat("nan"))
            assert bad.status_code == 500 and bad.headers["x-should-retry"] == "false"
            assert bad.json()["error"]["type"] == "server_error"
            streamed = await http.post("/v1/chat/completions", json=chat("nan", stream=True))
            last = events(streamed.text)[-1]
            assert set(last) == {"error"}, "no [DONE] after an error"
            assert (await good).json()["choices"][0]["message"]["content"] == "fine"
        assert await rig.is_idle()

    served(fake_model, body)


async def hang_up_after(rig: Rig, asked: dict[str, Any], pieces: int) -> None:
    """Send a request and hang up once so many pieces have come, or as many moments have passed."""
    gone, sent = asyncio.Event(), 0
    messages = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        if pieces and asked["stream"]:
            await gone.wait()
        else:
            await asyncio.sleep(0.02 * pieces)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += message["type"] == "http.response.body"
        if sent > pieces:
            gone.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
    }
    await rig.app(scope, receive, send)


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_hangs_up_leaves_nothing_running(fake_model: Path, stream: bool) -> None:
    """At once, while the request waits, after the first piece, in the middle: driven as a server would."""

    async def body(rig: Rig) -> None:
        for pieces in (0, 1, 5):
            await hang_up_after(rig, chat("forever", stream=stream), pieces)
            assert await rig.is_idle(), pieces

    served(fake_model, body)


def test_half_a_body_and_a_large_one(fake_model: Path) -> None:
    async def body(rig: Rig) -> None:
        async with rig.http() as http:
            large = json.dumps(chat("say " + "x" * 20_000)).encode()
            told = await http.post("/v1/chat/completions", content=large, headers=JSON)
            assert told.status_code == 413

            async def parts():
                for _ in range(10):
                    yield large[:2000]

            counted = await http.post("/v1/chat/completions", content=parts(), headers=JSON)
            assert (counted.status_code, counted.json()["error"]["code"]) == (413, "body_too_large")
            half = await http.post("/v1/chat/completions", content=large[:50], headers=JSON)
            assert half.status_code == 400
        assert await rig.is_idle()

    served(fake_model, body)


def test_too_many_in_the_line_are_turned_away(fake_model: Path) -> None:
    async def body(rig: Rig) -> None:
        async with rig.http() as http:
            running = [
                asyncio.ensure_future(
                    http.post("/v1/chat/completions", json=chat("count 200", max_tokens=300))
                )
                for _ in range(6)
            ]
            while rig.engine.num_waiting < 4:
                await asyncio.sleep(0.005)
            refused = await http.post("/v1/chat/completions", json=chat("say no"))
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "overloaded"
            assert {one.status_code for one in await asyncio.gather(*running)} == {200}
            # A request that alone has more outputs than may wait is served when nobody else waits.
            alone = await http.post("/v1/chat/completions", json=chat("say x", n=8, max_tokens=2))
            assert len(alone.json()["choices"]) == 8
        assert await rig.is_idle()

    served(fake_model, body)


def test_a_dead_engine_is_told_to_everybody(fake_model: Path) -> None:
    async def body(rig: Rig) -> None:
        async with rig.http() as http:
            waiting = [
                asyncio.ensure_future(http.post("/v1/chat/completions", json=chat(script)))
                for script in ("forever", "crash", "forever", "forever")
            ]
            answers = await asyncio.gather(*waiting)
            assert {answer.status_code for answer in answers} == {503}
            assert rig.deaths and rig.engine.failure is rig.deaths[0]
            assert (await http.get("/health")).status_code == 503
            later = await http.post("/v1/chat/completions", json=chat("say x"))
            assert later.status_code == 503
            assert (await http.get("/metrics")).status_code == 503

    served(fake_model, body)


def test_what_runs_is_ended_when_the_time_is_over(fake_model: Path) -> None:
    async def body(rig: Rig) -> None:
        async with rig.http() as http:
            waiting = asyncio.ensure_future(
                http.post("/v1/chat/completions", json=chat("forever", stream=True))
            )
            while not rig.engine.num_unfinished:
                await asyncio.sleep(0.005)
            rig.service.draining = True
            refused = await http.post("/v1/chat/completions", json=chat("say x"))
            assert refused.status_code == 503
            rig.engine.abort_all(EngineStopped("the server is going down"))
            last = events((await waiting).text)[-1]
            assert last["error"]["code"] == "shutting_down"
        assert await rig.is_idle()

    served(fake_model, body)


def test_several_prompts_of_which_one_is_bad_leave_nothing(fake_model: Path) -> None:
    async def body(rig: Rig) -> None:
        async with rig.http() as http:
            prompts = ["forever", "forever", "x" * 5000]
            bad = await http.post("/v1/completions", json={"prompt": prompts})
            assert bad.status_code == 400
            assert bad.json()["error"]["code"] == "prompt_too_long"
        assert await rig.is_idle()

    served(fake_model, body)


def test_hundreds_of_requests_of_which_a_tenth_hang_up(fake_model: Path) -> None:
    async def body(rig: Rig) -> None:
        limit = asyncio.Semaphore(16)

        async def one(http: httpx.AsyncClient, number: int) -> None:
            async with limit:
                asked = chat(f"count {number % 20 + 1}", max_tokens=200, stream=number % 3 == 0)
                call = asyncio.ensure_future(http.post("/v1/chat/completions", json=asked))
                if number % 10 == 0:
                    await asyncio.sleep(0.002)
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                    return
                answer = await call
                assert answer.status_code == 200
                wanted = " ".join(str(n + 1) for n in range(number % 20 + 1))
                if number % 3:
                    assert answer.json()["choices"][0]["message"]["content"] == wanted
                else:
                    deltas = [e["choices"][0]["delta"] for e in events(answer.text)[:-1]]
                    assert "".join(delta.get("content", "") for delta in deltas) == wanted

        async with rig.http() as http:
            await asyncio.gather(*(one(http, number) for number in range(200)))
        assert await rig.is_idle()

    served(fake_model, body, waiting=64, pace=Pace(tokens=8))
