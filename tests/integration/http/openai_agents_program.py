"""A program on the OpenAI Agents SDK with its default model class; run by tests/integration/http/test_other_clients.py.

Arguments: the question, and the way to run the agent (`plain` or `streamed`).
"""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled  # type: ignore[import-not-found]


@function_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


async def main(question: str, way: str) -> None:
    set_tracing_disabled(True)
    agent = Agent(name="Assistant", instructions="Answer briefly.", model="farhand", tools=[weather])
    if way == "plain":
        result = await Runner.run(agent, question)
        print(result.final_output)
        return
    streamed = Runner.run_streamed(agent, question)
    kinds = {event.type async for event in streamed.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
    print(streamed.final_output)


asyncio.run(main(*sys.argv[1:]))
