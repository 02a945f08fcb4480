"""`specstore query`: the draft tree that follows a context."""

from __future__ import annotations

import json
import logging
import uuid
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree
from tokenizers import Tokenizer

from datastore_service.cli.calls import open_service
from datastore_service.cli.options import (
    DEFAULT_ENDPOINT,
    FINGERPRINT,
    AsJson,
    Endpoint,
    Model,
    Tenant,
    TlsOptions,
    TokenizerOption,
    TokenOptions,
    namespace_of,
)
from datastore_service.client import Access, Datastore
from datastore_service.protocol.tree import DraftTree, tier_name
from datastore_service.protocol.types import MAX_VOCAB, Budget, Entry, Namespace, Opening, Status
from datastore_service.storage.errors import shortened
from datastore_service.storage.tokenizer import check_text, encode, load_tokenizer

ANSWER_SECONDS = 10.0


def query(
    command: typer.Context,
    context: Annotated[
        str, typer.Argument(help="text, or with --ids token ids separated by spaces or commas")
    ],
    tokenizer: TokenizerOption,
    prior: Annotated[Path | None, typer.Option(help="directory of a prior, instead of a service")] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    ids: Annotated[bool, typer.Option("--ids", help="the context is token ids")] = False,
    nodes: Annotated[int, typer.Option(help="most drafted tokens", min=1)] = 16,
    model: Model = "",
    tenant: Tenant = "",
    as_json: AsJson = False,
    *,
    shown: TokenOptions,
    tls: TlsOptions,
) -> None:
    """Shows what would be drafted after a context: by a service, which needs --model, or from a prior's files with --prior."""
    logging.getLogger("datastore_service").addHandler(
        logging.NullHandler()
    )  # the command says it in one line
    source = command.get_parameter_source("endpoint")
    if prior and source and source.name == "COMMANDLINE":
        raise ValueError("query: either --prior or --endpoint, not both")
    namespace = namespace_of(model, tokenizer, tenant)
    if not ids and FINGERPRINT.fullmatch(tokenizer):
        raise ValueError(
            "tokenizer: a fingerprint reads no text; give the model's folder, or token ids with --ids"
        )
    encoder = None if ids else load_tokenizer(tokenizer)
    tokens = _token_ids(context) if encoder is None else _encoded(context, encoder)
    access = Access(tls.files, "" if prior else shown.token())
    over = partial(_over_prior, prior) if prior else partial(_over_service, endpoint, access, shown.source)
    datastore = over(namespace)
    try:
        tree = _draft(datastore, np.array(tokens, np.int64), nodes)
    finally:
        datastore.close()
    if as_json:
        print(json.dumps(_fields(tree)))
    else:
        Console().print(_picture(tree, encoder))


def _token_ids(context: str) -> list[int]:
    words = context.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise ValueError(f"context: {word!r} is not a token id")
        if len(word) > len(str(MAX_VOCAB)) or int(word) >= MAX_VOCAB:
            raise ValueError(f"context: token id {shortened(word)} is outside [0, {MAX_VOCAB})")
    return [int(word) for word in words]


def _encoded(context: str, encoder: Tokenizer) -> list[int]:
    try:
        check_text(context)
        return encode(encoder, [context])[0].ids
    except ValueError as error:
        raise ValueError(f"context: {error}") from error


def _over_prior(directory: Path, namespace: Namespace) -> Datastore:
    from datastore_service.client.embedded import EmbeddedDatastore
    from datastore_service.engine.engine import Engine
    from datastore_service.storage.manifest import open_segments, read_manifest

    segments = open_segments(directory, namespace.tokenizer)
    return EmbeddedDatastore(lambda: Engine(read_manifest(directory).vocab_size, segments))


def _over_service(endpoint: str, access: Access, token_source: str, namespace: Namespace) -> Datastore:
    from datastore_service.client.remote import GrpcDatastore

    _check_existing(endpoint, access, token_source, namespace)
    datastore = GrpcDatastore(endpoint, namespace, lambda: access)
    datastore.wait_connected(ANSWER_SECONDS)
    return datastore


def _check_existing(endpoint: str, access: Access, token_source: str, namespace: Namespace) -> None:
    """Raises DatastoreError if the service does not have the namespace: a question must not make one."""
    from datastore_service.client.wire import namespace_message
    from proto_gen.specstore.v1.drafting_pb2 import DraftRequest
    from proto_gen.specstore.v1.drafting_pb2_grpc import DraftingStub

    greeting = DraftRequest(namespace=namespace_message(namespace), existing=True)
    with open_service(endpoint, access, token_source) as channel:
        draft = DraftingStub(channel).Draft
        next(draft(iter([greeting]), timeout=ANSWER_SECONDS, metadata=access.metadata))


def _draft(datastore: Datastore, tokens: np.ndarray, nodes: int) -> DraftTree:
    if not len(tokens):
        raise ValueError("context: empty")
    opening = Opening(publish=False, prompt_length=len(tokens))
    name = f"query-{uuid.uuid4()}"
    entry = Entry(name, tokens=tokens, budget=Budget(nodes), opening=opening, closing=True)
    (reply,) = datastore.step([entry], ANSWER_SECONDS)
    if reply.status is not Status.OK:
        raise ValueError(f"context: {reply.refusal or f'the datastore answered {reply.status.name}'}")
    return reply.tree


def _fields(tree: DraftTree) -> list[dict]:
    """The tree's nodes. parent: index of the parent in this list, -1 for the context."""
    columns = tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), tree.sources.tolist()
    return [
        {"token": token, "parent": parent, "prob": round(prob, 4), "tier": tier_name(tier)}
        for token, parent, prob, tier in zip(*columns, strict=True)
    ]


def _picture(tree: DraftTree, encoder: Tokenizer | None) -> Tree | str:
    if not len(tree):
        return "nothing matches"
    root = Tree("context")
    branches: list[Tree] = []
    for node in _fields(tree):
        shown = repr(encoder.decode([node["token"]], skip_special_tokens=False)) if encoder else ""
        label = Text(f"{node['token']} {shown} {node['prob']:.3f} {node['tier']}")
        parent = root if node["parent"] < 0 else branches[node["parent"]]
        branches.append(parent.add(label))
    return root
