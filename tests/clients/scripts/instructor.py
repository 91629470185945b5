"""instructor: MODE URL KEY; prints the answer in each of its modes, as JSON."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

MODE, URL, KEY = sys.argv[1:]


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    warm: bool
    season: Literal["summer", "winter"] | None


def ask(mode):
    sdk = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY or "unused", max_retries=0, timeout=120)
    client = instructor.from_openai(sdk, mode=mode)
    question = [{"role": "user", "content": "How is the weather in Oslo?"}]
    options = {"model": "demo", "max_tokens": 600, "max_retries": 0, "messages": question}
    return client.chat.completions.create(response_model=Weather, **options).model_dump()


modes = instructor.Mode
print(
    json.dumps(
        {mode.name: ask(mode) for mode in (modes.TOOLS, modes.TOOLS_STRICT, modes.JSON_SCHEMA)}
    )
)
