"""The agent of examples/calculator_endpoint.yaml: a plain HTTP client that offers the policy a calculator.

With a client library it is the same:

    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=TOOLS)
"""

import json
import urllib.error
import urllib.request
from typing import Any

from tool import calculate
from transformers.utils import get_json_schema

from shardwise.rewards import number_match

TOOLS = [get_json_schema(calculate)]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the endpoint is on this machine


def solve(example, endpoint) -> dict[str, float]:
    """Plays one episode: asks, calculates, asks again, until the policy answers without a call."""
    messages = list(example.messages)
    num_calls = 0
    try:
        while calls := chat(endpoint, messages).get("tool_calls"):
            num_calls += len(calls)
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": result_of(call)} for call in calls]
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return {"score": 0.0, "calls": num_calls}  # a limit was reached before there was an answer
    return {"score": number_match("", messages[-1]["content"], example.ground_truth), "calls": num_calls}


def chat(endpoint, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What the policy says next; it is appended to the messages."""
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, "messages": messages, "tools": TOOLS}).encode(),
        {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )
    with OPENER.open(request) as response:
        messages.append(json.load(response)["choices"][0]["message"])
    return messages[-1]


def result_of(call: dict[str, Any]) -> str:
    """What the calculator says, or what is wrong with the call."""
    try:
        return calculate(**json.loads(call["function"]["arguments"]))
    except Exception as error:
        return f"error: {error}"
