"""Commands with a waiting caller: cancelling the wait ends them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from farhand.machine.jobs.job import Ending, Job
from farhand.machine.jobs.jobs import Jobs
from farhand.protocol.errors import Cancelled, Failed

START_SECONDS = 2.0


class Foreground:
    """Runs commands of one `Jobs` to completion."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._ending: set[asyncio.Task[Ending]] = set()

    async def run(
        self,
        start: Coroutine[Any, Any, Job],
        *,
        stdin: bytes | None = None,
        patience: float | None = None,
        leaving: str | None = None,
    ) -> Job:
        """Wait for the end of a command that `start`, a call of `Jobs.start`, starts; not of one in the background.

        `stdin` is its whole input. After `patience` seconds, the command continues in the background. If the caller is
        cancelled with the message `leaving`, the command continues: the program will find it again.

        Raises what `start` raises; Cancelled if cancelled, after ending the whole tree, with a description of what was
        ended; Failed if the outcome cannot be known.
        """
        starting = asyncio.ensure_future(start)
        async with self._held(starting, leaving):
            job = await asyncio.shield(starting)
            if job.background:
                return job
            if stdin is not None and job.running:
                await self._feed(job, stdin)
            left = None if patience is None else max(0.0, patience - (time.time() - job.started_at / 1000))
            if not await self._jobs.wait(job, left) and await self._jobs.mark_background(job):
                return job
        if job.lost:
            ending = await self._jobs.end(job)
            raise Failed(ending.describe(f"outcome unknown: the keeper of session {job.id} was killed"))
        return job

    async def _feed(self, job: Job, data: bytes) -> None:
        try:
            await self._jobs.write(job, data)
            await self._jobs.close_stdin(job)
        except Failed:
            if job.running:
                raise

    @contextlib.asynccontextmanager
    async def _held(self, starting: asyncio.Future[Job], leaving: str | None) -> AsyncIterator[None]:
        """End the job if the block is cancelled; raises Cancelled then."""
        try:
            yield
        except asyncio.CancelledError as cancelled:
            if leaving is not None and leaving in cancelled.args:
                # An interrupted start would end the command.
                await asyncio.wait({starting}, timeout=START_SECONDS)
                raise
            # A separate task, which a second cancellation does not stop.
            ending = asyncio.ensure_future(self._end(starting))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise Cancelled((await asyncio.shield(ending)).describe("cancelled")) from None

    async def _end(self, starting: asyncio.Future[Job]) -> Ending:
        return await self._jobs.end(await starting)
