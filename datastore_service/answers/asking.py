"""Asks many questions, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datastore_service.answers.chat_server import Answer, ChatServer
from datastore_service.answers.prompts import Question

GREEDY = 0.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """The settings of the questions to a model.

    temperature: of the rounds after the first.
    max_tokens: most tokens of an answer.
    concurrency: questions at a time."""

    temperature: float
    max_tokens: int
    concurrency: int


async def ask_all(
    server: ChatServer,
    questions: Sequence[Question],
    wishes: Wishes,
    answered: Callable[[Question, Answer], None],
) -> None:
    """Calls `answered` with each answer as soon as it is there, in no order. Raises the first failure, and gives up what
    is under way then; a cancelled call does the same. The server stops generating for a connection that is closed."""
    waiting = iter(questions)

    async def work() -> None:
        for question in waiting:
            temperature = GREEDY if question.round == 1 else wishes.temperature
            answered(question, await server.answer(question.prompt, temperature, wishes.max_tokens))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(wishes.concurrency, len(questions))):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
