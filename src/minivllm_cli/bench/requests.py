"""The requests of a repetition: fresh random token ids, or the lines of a file."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from minivllm_cli.batch.prompts import PromptBuilder
from minivllm_cli.bench.workload import Workload
from minivllm_cli.config.bench_options import Length
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import CliError, Problem
from minivllm_cli.files.input_file import InputFile
from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.protocol.line_parser import LineParser
from minivllm_engine.protocol.lines import BadLine

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel

# Every choice made, so that no generation config adds a penalty: argmax, and no end but the length.
_GREEDY = SamplingParams(
    temperature=0,
    top_p=1,
    top_k=-1,
    min_p=0,
    repetition_penalty=1,
    presence_penalty=0,
    frequency_penalty=0,
    min_tokens=0,
    stop=(),
    seed=0,
    ignore_eos=True,
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a repetition.

    Attributes:
        gen: tokens that it must give; None where it may end by itself.
        chat: the prompt is a chat's.
    """

    name: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    gen: int | None
    chat: bool = False

    def for_engine(self) -> dict[str, Any]:
        """Write the form that `LLM.add_request` takes."""
        return {"prompt_token_ids": list(self.prompt_ids), "chat": self.chat}

    def with_params(self, **changes: Any) -> "BenchRequest":
        """Copy it, sampled in another way."""
        return replace(self, params=self.params.model_copy(update=changes))


@dataclass(frozen=True, slots=True)
class Repetition:
    """What one sample runs.

    Attributes:
        primers: requests that leave the shared prefixes in the cache, before timing starts.
    """

    requests: tuple[BenchRequest, ...]
    primers: tuple[BenchRequest, ...] = ()


def make_repetition(
    workload: Workload, number: int, vocab_size: int, lines: Sequence[BenchRequest] = ()
) -> Repetition:
    """Make the requests of repetition `number`; the same number gives the same ids, in any process.

    Lengths that are drawn do not depend on it: times of repetitions can be compared.

    Args:
        lines: of a file, for the workload `jsonl`, whose repetitions are all alike.
    """
    if workload.kind == "jsonl":
        return Repetition(tuple(lines))
    rng = random.Random(f"{workload.document()} {number}")
    if workload.times_decode:
        # Something has to be there to go on from: depth 0 is a prompt of one token.
        length, gen = max(workload.depth, 1), workload.gen.low
        return Repetition(
            tuple(
                BenchRequest(f"{i}", _ids(rng, length, vocab_size), _GREEDY, gen)
                for i in range(workload.batch)
            )
        )
    lengths = random.Random(f"{workload.document()} lengths")
    prefixes = [_ids(rng, workload.depth, vocab_size) for _ in range(workload.groups)] or [()]
    requests = []
    for i in range(workload.num_prompts):
        own = _ids(rng, _draw(lengths, workload.prompt), vocab_size)
        gen = _draw(lengths, workload.gen)
        params = _GREEDY.model_copy(update={"max_tokens": gen})
        requests.append(BenchRequest(f"{i}", prefixes[i % len(prefixes)] + own, params, gen))
    once = _GREEDY.model_copy(update={"max_tokens": 1})
    # One token more than the prefix: what a prompt ends with is never taken from the cache.
    primers = [
        BenchRequest(f"primer-{i}", prefix + _ids(rng, 1, vocab_size), once, 1)
        for i, prefix in enumerate(prefixes)
        if prefix
    ]
    return Repetition(tuple(requests), tuple(primers))


def _ids(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(vocab_size), k=count))


def _draw(rng: random.Random, length: Length) -> int:
    return rng.randint(length.low, length.high)


def read_lines(
    path: str, limit: int, settings: Settings, prepared: "PreparedModel", console: Console
) -> list[BenchRequest]:
    """Read the first `limit` lines of a file, 0 for all, as `generate` reads them.

    Raises:
        CliError: the file cannot be read, is empty, or has a line that cannot be run.
    """
    from minivllm_engine.engine.input_processor import InputProcessor

    try:
        file = InputFile.open(path, console)
        file.check_is_lines()
    except CliError as error:
        what = error.problems[0].what
        raise CliError(what, hint="--workload jsonl:FILE, or jsonl:- for stdin") from None
    parser = LineParser()
    builder = PromptBuilder(prepared.tokenizer, prepared.plan.max_model_len)
    engine = InputProcessor(prepared)
    requests, problems = [], []
    for index, (number, raw) in enumerate(islice(file.lines(), limit or None)):
        line = parser.parse(number, index, raw)
        if isinstance(line, BadLine):
            place = f"{file.name}:{line.number}:{line.column}"
            problems.append(Problem(f"{place}: {line.message} ({line.code})", hint=line.hint))
            continue
        if line.score:
            problems.append(
                Problem(f"{file.name}:{number}: continuations are scored, not answered")
            )
            continue
        params = settings.sampling(line.params, index=index)
        own = line.params.model_copy(update={"seed": params.seed})
        if len(line.parts) > 1:
            problems.append(Problem(f"{file.name}:{number}: several prompts in one line"))
            continue
        try:
            prompt = builder.build(line.parts[0], params)
            request = BenchRequest(str(line.id), prompt.ids, own, None, chat=prompt.request.chat)
            engine.admit(engine.read(request.for_engine(), own, index), request.name)
        except RequestError as error:
            what = f"{file.name}:{number}: {error.what}"
            problems.append(Problem(what, why=error.why, hint=error.hint))
            continue
        requests.append(request)
    file.close()
    if problems:
        raise CliError(problems[:5])
    if not requests:
        raise CliError(f"{file.name} holds no prompts (empty_file)")
    return requests
