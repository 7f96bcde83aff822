"""A web application with streamed answers: uvicorn examples.web_app:app, then curl localhost:8000/ask?q=What+is+47*86

Starlette's classes are FastAPI's, too. A client that disconnects ends its request: the generator is closed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from qkv_engine import Engine, RequestError


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    with Engine() as app.state.engine:
        yield


async def ask(request: Request) -> StreamingResponse | JSONResponse:
    """The answer to ``q``, in pieces, as plain text."""
    engine: Engine = request.app.state.engine
    messages = [{"role": "user", "content": request.query_params.get("q", "")}]
    outputs = engine.generate_async(messages, engine.params(output_kind="delta"))
    try:
        first = await anext(outputs)  # a refused request raises here, while the status can still be chosen
    except RequestError as error:
        return JSONResponse({"error": str(error)}, status_code=400)

    async def pieces() -> AsyncIterator[str]:
        yield first.delta
        async for output in outputs:
            yield output.delta

    return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")


app = Starlette(routes=[Route("/ask", ask)], lifespan=lifespan)
