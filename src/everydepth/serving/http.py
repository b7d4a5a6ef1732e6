"""The application around the routes of a model: health, metrics, models, errors and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError
from starlette.routing import Route

from everydepth.errors import EveryDepthError, NonFiniteError
from everydepth.serving.engine import Backend, Failed, Stopped
from everydepth.serving.guard import Guard, refusal
from everydepth.serving.meter import Meter
from everydepth.serving.names import Menu, UnknownModel
from everydepth.serving.scheduler import Busy

STATUS: dict[type[EveryDepthError], int] = {
    UnknownModel: 404,
    Failed: 500,
    NonFiniteError: 500,
    Busy: 503,
    Stopped: 503,
}
"""Our other errors are the client's: 400."""


def application(
    engine: Backend, meter: Meter, menu: Menu, *, key: str | None, largest: int
) -> FastAPI:
    """An application with the common routes, and with keys, limits and error handling for all."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await asyncio.to_thread(engine.start)
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        return JSONResponse({"ready": engine.ready}, 200 if engine.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(meter.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/results")
    async def results() -> dict[str, Any]:
        return meter.results().to_json()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": menu.listed()}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        return menu.one(name)

    @app.exception_handler(EveryDepthError)
    async def refused(_: Request, error: Exception) -> Response:
        status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400)
        return refusal(status, str(error), type(error).__name__)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = error.errors()[0]
        if found["type"] == "json_invalid":
            at, why = found["loc"][-1], found.get("ctx", {}).get("error", "")
            return refusal(400, f"the body is not JSON: {why} at character {at}")
        if found["loc"] == ("body",) and found["type"] in ("missing", "model_attributes_type"):
            return refusal(
                400,
                "the body is not a JSON object, or not declared as one; send an object, with the "
                "header Content-Type: application/json",
            )
        if found["type"] == "missing":
            return refusal(
                400,
                f"the body lacks {found['loc'][-1]!r}; add it (/v1/models lists the models and "
                "their depths)",
            )
        # Behind the field come the types that were tried, which say nothing to a client.
        where = f"{found['loc'][1]}: " if len(found["loc"]) > 1 else ""
        return refusal(400, where + found["msg"].removeprefix("Value error, "))

    @app.exception_handler(StarletteError)
    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException | StarletteError)
        said = str(error.detail)
        if error.status_code in (404, 405):
            routes = sorted({route.path for route in app.routes if isinstance(route, Route)})
            said += f": {request.method} {request.url.path}; the routes are {', '.join(routes)}"
        return refusal(error.status_code, said)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        # The server's log has the traceback; clients do not get internal details.
        return refusal(500, "the server failed on this request", "InternalServerError")

    app.add_middleware(Guard, key=key, largest=largest)
    return app
