"""Asks the tenants' accounts for more output tokens, for the streams of this replica that have budgets."""

from __future__ import annotations

import asyncio
import logging

from inference.agent.budgets.allowance import NO_BUDGET, Allowance
from inference.agent.running import RunningStream
from stream_fabric.accounts.budgets import RESERVATION_LOST, Crossed, reserved_prompt
from stream_fabric.accounts.ports import Accounts
from stream_fabric.errors import FabricError
from stream_fabric.process.budget_events import BudgetEvents

log = logging.getLogger(__name__)

_RETRY_S = 0.25


class BudgetExtender:
    """``accounts`` None: this replica cannot ask, so its streams end at their first grant."""

    def __init__(self, accounts: Accounts | None, events: BudgetEvents, tasks: asyncio.TaskGroup) -> None:
        self._accounts = accounts
        self._events = events
        self._tasks = tasks

    def limit(self, stream: RunningStream) -> None:
        """Hold a new stream to its grant, if it has budgets."""
        work = stream.work
        if work.grant:
            prompt = reserved_prompt(work.prompt_tokens)
            stream.limit(Allowance(work.grant, prompt, work.output_limit, work.request.choices))

    def ask(self, stream: RunningStream, question: tuple[int, int]) -> None:
        """Ask for more output tokens; the stream gets the reply."""
        self._tasks.create_task(self._ask(stream, question))

    async def _ask(self, stream: RunningStream, question: tuple[int, int]) -> None:
        """Ask until Redis answers. Meanwhile frames wait: without Redis they could not be appended either."""
        output, prompt = question
        granted, crossed, tenant = 0, tuple[Crossed, ...](), stream.work.tenant
        while self._accounts is not None and not stream.closed:
            try:
                granted, crossed = await self._accounts.extend(tenant, stream.name, output, prompt)
                break
            except FabricError as error:
                log.warning("extension of a budget's grant failed, retrying: stream=%s error=%s", stream.name, error)
                await asyncio.sleep(_RETRY_S)
        if granted == RESERVATION_LOST:
            # The counters are lost with it: to end the stream here would cut an answer and protect no budget
            log.warning("reservation of a stream's budgets is lost, it goes on without: stream=%s", stream.name)
            granted = NO_BUDGET
        for each in crossed:
            self._events.report(tenant, each, stream.work.request.model)
        stream.receive_grant(question, granted)
