"""``/v1/messages``: Anthropic's Messages."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qkv_engine.text.tokenizer import Tokenizer

from ..bodies import JsonObject, read_with
from ..errors import MESSAGES
from ..generate import GenerationRequest, frontend_of, generate, json_response
from ..tools.choice import ToolUse
from ..tools.history import for_template
from .messages_answer import MessagesAnswer
from .messages_body import NAMES, read_count, read_messages


def messages_routes() -> list[Route]:
    """The routes of the dialect."""
    return [
        Route(MESSAGES, answer, methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", count_tokens, methods=["POST"]),
    ]


async def answer(request: Request) -> Response:
    """``POST /v1/messages``."""
    frontend = frontend_of(request)
    asked, load = await read_with(request, read_messages, frontend)
    answer_id = f"msg_{request.state.own_id}"
    chat, kwargs = asked.chat, asked.chat.template_kwargs()
    tools = ToolUse(chat, frontend.engine.tokenizer)
    answer = MessagesAnswer(asked, answer_id, frontend.name, tools, request.state.id)

    def prompts() -> list[list[JsonObject]]:
        return [for_template(chat.messages, frontend.threads)]

    work = GenerationRequest(
        chat, load, answer, answer, answer_id, NAMES, prompts, template_kwargs=kwargs, tools=tools, shortens=True
    )
    return await generate(request, work)


async def count_tokens(request: Request) -> Response:
    """``POST /v1/messages/count_tokens``: the tokens of a prompt that is not answered."""
    frontend = frontend_of(request)
    chat, load = await read_with(request, read_count, frontend)
    frontend.check_model(chat.model)

    def count(tokenizer: Tokenizer) -> int:
        messages, most = for_template(chat.messages, frontend.threads), frontend.max_tokens
        return len(tokenizer.chat_prompt(messages, chat.template_kwargs(), max_tokens=most)[1])

    return json_response({"input_tokens": await frontend.with_tokenizer(load, count)})
