"""pydantic-ai: MODE URL KEY; prints the answer in two of its modes, as JSON."""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODE, URL, KEY = sys.argv[1:]
PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY or "unused")


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]
    warm: bool
    season: Literal["summer", "winter"] | None


def ask(model, output):
    agent = Agent(model("demo", provider=PROVIDER), output_type=output(Weather), retries=0)
    settings = {"max_tokens": 600, "temperature": 0.0}
    return agent.run_sync(
        "How is the weather in Oslo?", model_settings=settings
    ).output.model_dump()


print(
    json.dumps(
        {
            "tool": ask(OpenAIChatModel, ToolOutput),
            "native": ask(OpenAIChatModel, NativeOutput),
            "responses": ask(OpenAIResponsesModel, NativeOutput),
        }
    )
)
