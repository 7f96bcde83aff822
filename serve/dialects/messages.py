"""``/v1/messages``: Anthropic's Messages."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qkv_engine.text.tokenizer import Tokenizer

from ..bodies import read_with
from ..errors import MESSAGES
from ..tools import for_template
from ..work import Work, frontend_of, json_response, perform
from .messages_answer import MessagesAnswer
from .messages_body import NAMES, read_count, read_messages


def messages_routes() -> list[Route]:
    """The routes of the dialect."""
    return [
        Route(MESSAGES, create, methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", count_tokens, methods=["POST"]),
    ]


async def create(request: Request) -> Response:
    """``POST /v1/messages``."""
    frontend = frontend_of(request)
    asked, load = await read_with(request, read_messages, frontend)
    answer_id = f"msg_{request.state.own_id}"
    answer = MessagesAnswer(asked, answer_id, frontend.name, frontend.engine.tokenizer, request.state.id)
    chat = asked.chat
    work = Work(chat, load, answer, answer, answer_id, NAMES, lambda: [for_template(chat.messages)], shortens=True)
    return await perform(request, work._replace(template_kwargs=chat.template_kwargs()))


async def count_tokens(request: Request) -> Response:
    """``POST /v1/messages/count_tokens``: the tokens of a prompt that is not answered."""
    frontend = frontend_of(request)
    chat, load = await read_with(request, read_count, frontend)
    frontend.check_model(chat.model)

    def count(tokenizer: Tokenizer) -> int:
        messages, most = for_template(chat.messages), frontend.max_tokens
        return len(tokenizer.chat_prompt(messages, chat.template_kwargs(), max_tokens=most)[1])

    return json_response({"input_tokens": await frontend.with_tokenizer(load, count)})
