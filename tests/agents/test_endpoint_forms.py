"""Other APIs of the endpoint: over plain HTTP, and with OpenAI's own client."""

import contextlib
import http.client
import json

import pytest
from timing import deadline

from rlcore.agents.endpoint import Endpoint
from rlcore.agents.endpoint_http import Refused, Sampling, answered, cleaned, read_request
from rlcore.agents.endpoint_server import Address, Answered, SessionServer
from rlcore.environments.protocol import Action, ToolCall
from rlcore.errors import UserError
from rlcore.tasks import make_task

SAMPLING = Sampling(evaluates=False, temperature=1.0, top_p=1.0, stop=[], max_len=512)
CALL = ToolCall("add", {"a": 1, "b": 2})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAID = {
    "text": Action("3", (), finish_reason="stop", tokens=(5, 2)),
    "cut": Action("3 and", (), finish_reason="length", tokens=(5, 2)),
    "call": Action("", (CALL,), finish_reason="stop", tokens=(5, 2)),
    "text and calls": Action("Let me.", (CALL, CALL), finish_reason="stop", tokens=(5, 2)),
}
PATHS = ("chat/completions", "messages", "responses")


class Script:
    """Answers every request with `said`, and keeps the chat requests."""

    def __init__(self):
        self.asked = []
        self.said = SAID["text"]
        self.server = SessionServer(self.complete, SAMPLING.max_len)

    def complete(self, asked, waits):
        self.asked.append(read_request(asked, SAMPLING))
        return Answered(answered(self.said, len(self.asked)), lambda read: None)

    def post(self, path, body, status=200, **headers):
        headers = headers or {"Authorization": f"Bearer {self.server.api_key}"}
        link = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=TIMEOUT)
        with contextlib.closing(link):
            link.request("POST", f"/v1/{path}", json.dumps(body).encode(), headers)
            with link.getresponse() as reply:
                text = reply.read().decode()
        assert reply.status == status, text
        return text if body.get("stream") and status == 200 else json.loads(text)


TIMEOUT = deadline(60)


@pytest.fixture(scope="module")
def server():
    script = Script()
    yield script
    script.server.close()


@pytest.fixture
def script(server):
    server.asked.clear()
    server.said = SAID["text"]
    return server


def begun(path):
    """(a first request with a tool, how an answer and what follows are sent back)."""
    function = {"name": "add", "description": "Add.", "parameters": SCHEMA}
    if path == "messages":
        tool = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
        body = {"model": "m", "max_tokens": 9, "system": "Be short.", "tools": [tool]}
        return {**body, "messages": [{"role": "user", "content": "1+2"}]}
    if path == "responses":
        tool = {"type": "function", **function}
        return {"model": "m", "instructions": "Be short.", "tools": [tool], "input": "1+2"}
    first = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+2"}]
    return {"messages": first, "tools": [{"type": "function", "function": function}]}


def continued(path, body, answer):
    """The next request of the conversation."""
    if path == "messages":
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        follows = results or [{"type": "text", "text": "Go on."}]
        said = {"role": "assistant", "content": answer["content"]}
        messages = [*body["messages"], said, {"role": "user", "content": follows}]
        return {**body, "messages": messages}
    if path == "responses":
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
            for item in answer["output"]
            if item["type"] == "function_call"
        ]
        follows = results or [{"role": "user", "content": "Go on."}]
        first = [{"role": "user", "content": body["input"]}]
        return {**body, "input": [*first, *answer["output"], *follows]}
    said = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        for call in said.get("tool_calls", [])
    ]
    follows = results or [{"role": "user", "content": "Go on."}]
    return {**body, "messages": [*body["messages"], said, *follows]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("said", SAID)
def test_every_form_asks_and_continues_the_same_conversation(script, path, said):
    script.said = SAID[said]
    body = begun(path)
    answer = script.post(path, body)
    script.post(path, continued(path, body, answer))
    first, second = script.asked
    assert [m["content"] for m in first.messages] == ["Be short.", "1+2"]
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert first.tools[0]["function"]["name"] == "add"
    assert first.tools[0]["function"]["parameters"] == SCHEMA
    own = cleaned(answered(script.said, 1)["choices"][0]["message"], {})
    assert second.messages[:3] == [*first.messages, own]
    follows = [(m["role"], m["content"]) for m in second.messages[3:]]
    calls = len(script.said.tool_calls)
    assert follows == ([("tool", "3")] * calls if calls else [("user", "Go on.")])
    assert all(m.get("name") == "add" for m in second.messages[3:] if m["role"] == "tool")


def events(text):
    """(name, data) of a stream."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines.get("event", ""), lines["data"]))
    return found


@pytest.mark.parametrize("said", SAID)
def test_a_stream_of_responses_tells_the_same(script, said):
    script.said = SAID[said]
    whole = script.post("responses", begun("responses"))
    found = events(script.post("responses", {**begun("responses"), "stream": True}))
    data = [json.loads(d) for _, d in found]
    assert [name for name, _ in found] == [d["type"] for d in data]
    assert [d["sequence_number"] for d in data] == list(range(len(data)))
    done = [d["item"] for d in data if d["type"] == "response.output_item.done"]
    strip = [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in whole["output"]]
    assert [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in done] == strip
    assert data[-1]["response"]["output"] == done
    assert data[-1]["type"] == f"response.{whole['status']}"
    text = "".join(d["delta"] for d in data if d["type"] == "response.output_text.delta")
    assert text == script.said.text


@pytest.mark.parametrize("said", SAID)
def test_a_stream_of_messages_tells_the_same(script, said):
    script.said = SAID[said]
    whole = script.post("messages", begun("messages"))
    found = events(script.post("messages", {**begun("messages"), "stream": True}))
    data = [json.loads(d) for _, d in found]
    assert [name for name, _ in found] == [d["type"] for d in data]
    blocks = {}
    for event in data:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["input"] = json.loads(delta["partial_json"])
    made = [{k: v for k, v in b.items() if k != "id"} for b in blocks.values()]
    assert made == [{k: v for k, v in b.items() if k != "id"} for b in whole["content"]]
    assert data[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    reasons = {"text": "end_turn", "cut": "max_tokens"}
    assert whole["stop_reason"] == reasons.get(said, "tool_use")


def test_a_completion_is_a_question_of_the_user(script):
    answer = script.post("completions", {"prompt": "1+2", "max_tokens": 4})
    assert answer["choices"][0]["text"] == "3" and answer["object"] == "text_completion"
    assert script.asked[0].messages == [{"role": "user", "content": "1+2"}]
    assert script.asked[0].max_tokens == 4
    found = events(script.post("completions", {"prompt": ["1+2"], "stream": True}))
    assert json.loads(found[0][1])["choices"][0]["text"] == "3" and found[-1][1] == "[DONE]"


def test_anthropic_s_clients_send_the_key_in_a_header_of_their_own(script):
    key = {"x-api-key": script.server.api_key}
    script.post("messages?beta=true", begun("messages"), **key)
    error = script.post("messages", begun("messages"), 401, **{"x-api-key": "another"})
    assert error["type"] == "error" and error["error"]["message"]


ASK = [{"role": "user", "content": "1+2"}]
CHAT = {"messages": ASK}
NAMED = {"type": "function", "function": {"name": "add"}}
OLD = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
PICTURE = [{"type": "image", "source": {}}]
MESSAGES = {"messages": ASK, "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {**CHAT, "tool_choice": "required"}, "would constrain the tokens"),
        ("chat/completions", {**CHAT, "tool_choice": NAMED}, "would constrain the tokens"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "constrain"),
        ("chat/completions", {"messages": [{**ASK[0], "name": "Ann"}]}, "name of a message"),
        ("chat/completions", {"messages": [OLD]}, "use tool_calls"),
        ("chat/completions", {**CHAT, "functions": [{"name": "add"}]}, "functions="),
        ("chat/completions", {**CHAT, "repetition_penalty": 1.1}, "sampling=override"),
        ("chat/completions", {**CHAT, "seed": 1}, "sampling=override"),
        ("completions", {"prompt": [1, 2]}, "not one text"),
        ("completions", {"prompt": "1", "echo": True}, "echo=true"),
        ("completions", {"prompt": "1", "tools": [NAMED]}, "use /v1/chat/completions"),
        ("messages", {**MESSAGES, "tool_choice": {"type": "any"}}, "would constrain the tokens"),
        ("messages", {**MESSAGES, "thinking": {"type": "enabled"}}, "thinking="),
        ("messages", {"messages": [{"role": "user", "content": PICTURE}]}, "text alone"),
        ("messages", {"messages": [{"role": "system", "content": "1"}]}, "role='system'"),
        ("messages", {**MESSAGES, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_"),
        ("messages", {**MESSAGES, "container": "x"}, "container is not supported"),
        ("responses", {"input": "1", "previous_response_id": "r"}, "send the whole conversation"),
        ("responses", {"input": "1", "tools": [{"type": "web_search"}]}, "web_search"),
        ("responses", {"input": [{"type": "computer_call"}]}, "computer_call"),
        ("responses", {"input": "1", "text": {"format": {"type": "json_object"}}}, "constrain"),
        ("responses", {"input": "1", "reasoning": {"effort": "high"}}, "reasoning="),
        ("responses", {"input": "1", "truncation": "auto"}, "truncation="),
    ],
)
def test_what_would_change_the_conversation_or_the_sampling_is_refused(script, path, body, words):
    error = script.post(path, body, 400)
    assert words in error["error"]["message"]
    assert not script.asked


NEUTRAL = {
    "n": 1,
    "repetition_penalty": 1.0,
    "top_logprobs": 0,
    "top_k": -1,
    "min_p": 0.0,
    "logit_bias": {},
    "seed": None,
    "frequency_penalty": 0.0,
    "stop": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "functions": [],
}


def test_neutral_values_change_nothing():
    assert read_request({**CHAT, **NEUTRAL}, SAMPLING) == read_request(CHAT, SAMPLING)


OTHER = {"temperature": 0.2, "top_p": 0.5, "stop": ["x"], "seed": 3, "repetition_penalty": 1.2}


@pytest.mark.parametrize("field", OTHER)
def test_another_sampling_is_refused_or_overridden_and_counted(field):
    asked = {**CHAT, field: OTHER[field]}
    with pytest.raises(Refused, match="sampling=override samples as the run does"):
        read_request(asked, SAMPLING)
    overriding = Sampling(False, 1.0, 1.0, [], 512, overrides=True)
    request = read_request(asked, overriding)
    assert request.overridden and not read_request(CHAT, overriding).overridden
    assert request.messages == read_request(CHAT, SAMPLING).messages


def test_what_sampling_does_not_cover_is_refused_all_the_same():
    overriding = Sampling(False, 1.0, 1.0, [], 512, overrides=True)
    for field, value in (("n", 2), ("tool_choice", "required"), ("logprobs", True)):
        with pytest.raises(Refused, match=field):
            read_request({**CHAT, field: value}, overriding)


def test_the_address_that_is_told_may_be_another():
    server = SessionServer(lambda asked, waits: None, 8, Address("0.0.0.0", "reachable.test"))
    try:
        assert server.base_url == f"http://reachable.test:{server.server_port}/v1"
        assert server.server_address[0] == "0.0.0.0"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"sampling": "warn"}, "choose refuse or override"),
        ({"bind": "0.0.0.0"}, "set environment.args.advertise"),
        ({"bind": 3}, "must be texts"),
    ],
)
def test_arguments_of_the_endpoint_are_refused_in_a_sentence(args, words, tmp_path):
    (tmp_path / "mine.py").write_text("def run(): return 1.0")
    with pytest.raises(UserError, match=words):
        Endpoint(make_task("digits", {}), program=f"{tmp_path}/mine.py:run", **args)


def test_openai_s_client_reads_responses_and_streams(script):
    from openai import OpenAI

    with OpenAI(base_url=script.server.base_url, api_key=script.server.api_key) as client:
        script.said = SAID["text and calls"]
        answer = client.responses.create(**begun("responses"))
        assert answer.output_text == "Let me."
        assert [i.type for i in answer.output] == ["message", "function_call", "function_call"]
        with client.responses.stream(**begun("responses")) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[0] == "response.created" and final.output_text == "Let me."
        assert json.loads(final.output[1].arguments) == dict(CALL.arguments)
        script.said = SAID["text"]
        assert client.completions.create(model="m", prompt="1+2").choices[0].text == "3"
        assert client.models.list().data[0].max_model_len == SAMPLING.max_len
