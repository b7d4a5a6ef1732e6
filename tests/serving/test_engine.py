"""The built-in engine between its thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import patch

import pytest
from tests.helpers.talking import Talker

from everydepth.serving import Request, Scheduler
from everydepth.serving.engine import Embedded, Stopped
from everydepth.stream import as_stream


def test_requests_that_arrive_while_the_engine_stops_are_told_so(talker: Talker) -> None:
    engine = Embedded(Scheduler(as_stream(talker.model)), packed=False)
    begun, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        begun.set()
        go_on.wait(30)

    async def ask() -> None:
        async for _ in engine.run(Request(prompt=(5, 6), max_tokens=9)):
            pass

    async def asked() -> list[Any]:
        running = asyncio.create_task(ask())
        await asyncio.to_thread(begun.wait, 30)
        stop = asyncio.create_task(asyncio.to_thread(engine.stop))
        try:
            async with asyncio.timeout(10):
                while engine.ready:
                    await asyncio.sleep(0)
            with pytest.raises(Stopped, match="does not run"):
                await ask()
            with patch.object(Embedded, "ready", new=True):  # as it was a moment before
                late = asyncio.create_task(ask())
                await asyncio.sleep(0)
        finally:
            go_on.set()
            await stop
        async with asyncio.timeout(10):
            return await asyncio.gather(running, late, return_exceptions=True)

    hook = talker.model.lm_head.register_forward_pre_hook(wait)
    try:
        engine.start()
        found = asyncio.run(asked())
    finally:
        hook.remove()
    assert [str(one) for one in found] == ["the server is shutting down; send it again"] * 2
