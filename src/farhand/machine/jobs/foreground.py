"""Commands with a waiting caller: cancelling the wait ends them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
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

    async def run(self, command: str, **options: Any) -> Job:
        """Start a command as `Jobs.start` does, and wait for its end.

        Raises what `Jobs.start` raises; Cancelled if cancelled, after ending the whole tree, with a description of what
        was ended; Failed if the outcome cannot be known.
        """
        starting = asyncio.ensure_future(self._jobs.start(command, **options))
        async with self.held(starting):
            job = await asyncio.shield(starting)
            await self._jobs.wait(job)
        if job.lost:
            raise await self.lost(job)
        return job

    @contextlib.asynccontextmanager
    async def held(self, starting: asyncio.Future[Job], *, leaving: str | None = None) -> AsyncIterator[None]:
        """End the job if the block is cancelled; raises Cancelled then.

        If it is cancelled with the message `leaving`, the job continues: the program will find it again.
        """
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

    async def lost(self, job: Job) -> Failed:
        """End what a lost job left running, and return the error that says so."""
        ending = await self._jobs.end(job)
        return Failed(ending.describe(f"outcome unknown: the keeper of session {job.id} was killed"))

    async def _end(self, starting: asyncio.Future[Job]) -> Ending:
        return await self._jobs.end(await starting)
