"""`specstore collect`: a served model's own answers as a corpus, and from it a prior or live text."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn

from datastore_service.answers.answer_file import AnswerFile
from datastore_service.answers.errors import ModelServerError
from datastore_service.cli.admin import add_documents
from datastore_service.cli.options import (
    FINGERPRINT,
    Model,
    NamespaceOptions,
    ServiceOptions,
    Tenant,
    TokenizerOption,
)
from datastore_service.cli.output import errors, progress
from datastore_service.cli.prior import BuiltPrior, build_shown
from datastore_service.client import tokenizer_fingerprint
from datastore_service.endpoint import parse_endpoint
from datastore_service.storage.errors import StorageError
from datastore_service.storage.tokenizer import load_tokenizer
from proto_gen.specstore.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from datastore_service.answers.prompts import Question

KEY_VARIABLE = "SPECSTORE_SERVER_KEY"
INTERRUPTED = 130  # exit status: 128 and the number of SIGINT, as shells have it


@dataclass(kw_only=True)
class AskingOptions:
    """Who is asked, and how."""

    server: Annotated[str, typer.Option(help="address of a running SGLang server")] = "http://127.0.0.1:30000"
    server_key_file: Annotated[
        Path | None, typer.Option(help=f"file with the server's API key; else {KEY_VARIABLE}")
    ] = None
    rounds: Annotated[
        int, typer.Option(help="answers to each prompt: the first greedy, the others sampled", min=1)
    ] = 1
    temperature: Annotated[float, typer.Option(help="of the sampled answers")] = 1.0
    max_tokens: Annotated[int, typer.Option(help="most tokens of an answer", min=1)] = 512
    concurrency: Annotated[int, typer.Option(help="prompts asked at a time", min=1)] = 16

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature: {self.temperature} is not above 0")

    def key(self) -> str:
        """ "" for none."""
        file = self.server_key_file
        return file.read_text().strip() if file else os.environ.get(KEY_VARIABLE, "")


@dataclass(kw_only=True)
class TargetOptions:
    """The options that say where the answers go besides their file."""

    prior: Annotated[Path | None, typer.Option(help="directory of a prior to build from the answers")] = None
    live: Annotated[
        bool, typer.Option("--live", help="add the answers to the live tier of the service at --endpoint")
    ] = False
    model: Model = ""
    tokenizer: TokenizerOption = ""
    tenant: Tenant = ""
    service: ServiceOptions

    def check(self, endpoint_given: bool) -> None:
        """Finds what is wrong before the model is asked. Raises ValueError naming the option, StorageError for a
        tokenizer that cannot be used."""
        if (self.prior or self.live) and not self.tokenizer:
            raise ValueError("tokenizer: --prior and --live need it")
        if self.live and not self.model:
            raise ValueError("model: --live needs it")
        if not self.live and (self.model or endpoint_given):
            raise ValueError(f"{'model' if self.model else 'endpoint'}: is for --live")
        if self.prior and FINGERPRINT.fullmatch(self.tokenizer):
            raise ValueError("tokenizer: a fingerprint reads no text; --prior needs the model's folder")
        if self.prior:
            tokenizer_fingerprint(self.tokenizer)
            load_tokenizer(self.tokenizer)
        if self.live:
            self.namespace.namespace()
            parse_endpoint(self.service.endpoint)

    def check_prior(self, complete: bool) -> None:
        """Raises StorageError for a directory with a prior. complete: the answers are all there, so that an unfinished
        prior may be this command's."""
        from datastore_service.storage.manifest import has_manifest, read_manifest

        if self.prior and has_manifest(self.prior) and not (complete and read_manifest(self.prior).source):
            raise StorageError(self.prior, "prior", "is here already; `specstore build` adds to it")

    @property
    def namespace(self) -> NamespaceOptions:
        return NamespaceOptions(self.model, self.tokenizer, self.tenant)


@dataclass(frozen=True)
class Corpus:
    """A finished file of answers. tokens: their ids in all, None unless every answer has them."""

    file: Path
    answers: int
    tokens: int | None

    @property
    def field(self) -> str:
        """The field that `specstore build` reads best."""
        return "answer" if self.tokens is None else "tokens"

    def __str__(self) -> str:
        held = "not all with token ids" if self.tokens is None else f"{self.tokens:,} tokens"
        return f"{self.file}: {self.answers:,} answers, {held}"


def collect(
    command: typer.Context,
    prompts: Annotated[
        list[Path], typer.Argument(help="JSONL or Parquet (see --field), or plain text, which is one prompt")
    ],
    out: Annotated[Path, typer.Option(help="JSONL file of the answers; one that was begun is continued")],
    field: Annotated[
        str, typer.Option(help="field of a JSONL line, column of a Parquet file, that is the prompt")
    ] = "prompt",
    *,
    asking: AskingOptions,
    target: TargetOptions,
) -> None:
    """Collects a served model's own answers to prompts, as a corpus and a prior. An interrupted run goes on where it stopped."""
    from datastore_service.answers.prompts import Question, read_prompts

    source = command.get_parameter_source("endpoint")
    target.check(endpoint_given=source is not None and source.name == "COMMANDLINE")
    asked = read_prompts(prompts, field)
    with AnswerFile(out) as file:
        missing = file.missing([prompt.text for prompt in asked], asking.rounds)
        target.check_prior(complete=not missing)
        _ask(asking, [Question(asked[index], number) for index, number in missing], file)
        corpus = Corpus(out, len(file), None if file.without_tokens else file.tokens)
    prior = build_shown([out], target.prior, target.tokenizer, corpus.field) if target.prior else None
    live = add_documents(target.service, target.namespace, [out], corpus.field) if target.live else None
    _print(corpus, prior, live, target.service.as_json)


def _ask(asking: AskingOptions, questions: Sequence[Question], file: AnswerFile) -> None:
    """Puts the answers into the file. Ends the command if it is interrupted."""
    if not questions:
        return
    total = len(file) + len(questions)
    try:
        _ask_shown(asking, questions, file)
    except ModelServerError as error:
        raise ModelServerError(f"{error}; {_state(file, total)}") from error
    except KeyboardInterrupt:
        errors.print(f"specstore: interrupted; {_state(file, total)}; the same command goes on", markup=False)
        raise typer.Exit(INTERRUPTED) from None


def _ask_shown(asking: AskingOptions, questions: Sequence[Question], file: AnswerFile) -> None:
    from datastore_service.answers.asking import Wishes, ask_all
    from datastore_service.answers.chat_server import Answer, ChatServer

    wishes = Wishes(asking.temperature, asking.max_tokens, asking.concurrency)

    async def run() -> None:
        async with ChatServer(asking.server, asking.key(), asking.concurrency) as server:
            await server.check()
            await ask_all(server, questions, wishes, answered)

    def answered(question: Question, answer: Answer) -> None:
        row = {"prompt": question.prompt.text, "round": question.round, "answer": answer.text}
        file.append(row if answer.tokens is None else row | {"tokens": answer.tokens})
        bar.advance(task)

    with progress(BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task("answers", completed=len(file), total=len(file) + len(questions))
        asyncio.run(run())


def _state(file: AnswerFile, total: int) -> str:
    return f"{len(file)} of {total} answers are in {file.path}"


def _print(corpus: Corpus, prior: BuiltPrior | None, live: pb.WarmupReply | None, as_json: bool) -> None:
    if as_json:
        fields: dict[str, object] = {"answers": corpus.answers, "tokens": corpus.tokens}
        fields |= {"prior": prior.fields} if prior else {}
        fields |= {"live": {"documents": live.documents, "tokens": live.tokens}} if live else {}
        print(json.dumps(fields))
        return
    print(corpus)
    if prior:
        print(prior)
    if live:
        print(f"added {live.documents} documents, {live.tokens} tokens")
