"""The workload `jsonl:FILE`: lines as `generate` reads them, as requests of a repetition."""

from itertools import islice
from typing import TYPE_CHECKING

from minivllm_cli.batch.prompts import PromptBuilder
from minivllm_cli.bench.requests import BenchRequest
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import CliError, Problem
from minivllm_cli.files.input_file import InputFile
from minivllm_engine.core.errors import RequestError
from minivllm_engine.protocol.line_parser import LineParser
from minivllm_engine.protocol.lines import BadLine

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer


def read_lines(
    path: str,
    limit: int,
    settings: Settings,
    tokenizer: "Tokenizer",
    max_model_len: int,
    console: Console,
) -> list[BenchRequest]:
    """The first `limit` lines, 0 for all.

    Raises:
        CliError: the file cannot be read, is empty, or has a line that cannot be run.
    """
    try:
        file = InputFile.open(path, console)
        file.check_is_lines()
    except CliError as error:
        what = error.problems[0].what
        raise CliError(what, hint="--workload jsonl:FILE, or jsonl:- for stdin") from None
    parser = LineParser()
    builder = PromptBuilder(tokenizer, max_model_len)
    requests, problems = [], []
    for index, (number, raw) in enumerate(islice(file.lines(), limit or None)):
        line = parser.parse(number, index, raw)
        if isinstance(line, BadLine):
            place = f"{file.name}:{line.number}:{line.column}"
            problems.append(Problem(f"{place}: {line.message} ({line.code})", hint=line.hint))
            continue
        params = settings.sampling(line.params, index=index)
        try:
            (prompt,) = (builder.build(part, params) for part in line.parts)
        except ValueError:
            problems.append(Problem(f"{file.name}:{number}: several prompts in one line"))
            continue
        except RequestError as error:
            problems.append(Problem(f"{file.name}:{number}: {error.what}", hint=error.hint))
            continue
        if builder.is_too_long(prompt) or not prompt.ids:
            what = f"{len(prompt.ids)} prompt tokens, between 1 and {max_model_len - 1} can be run"
            problems.append(Problem(f"{file.name}:{number}: {what}"))
            continue
        own = line.params.model_copy(update={"seed": params.seed})
        requests.append(BenchRequest(str(line.id), prompt.ids, own, None, chat=prompt.request.chat))
    file.close()
    if problems:
        raise CliError(problems[:5])
    if not requests:
        raise CliError(f"{file.name} holds no prompts (empty_file)")
    return requests
