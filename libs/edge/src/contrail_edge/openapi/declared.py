"""All routes declared with FastAPI: for the OpenAPI document, and as the reference lane."""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BeforeValidator
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response as StarletteResponse
from starlette.types import Receive, Scope, Send

from contrail_common import __version__, errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_edge.http.delivery import send_answer
from contrail_edge.http.problems import FIELD_ERRORS_MAX, refusal
from contrail_edge.http.requests import REQUEST_KEY, Request
from contrail_edge.http.responses import Answer
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.inputs.json_body import decode_untyped, escape_pointer
from contrail_edge.inputs.negotiation import JSON_TYPE, content_type
from contrail_edge.inputs.paths import percent_decode
from contrail_edge.openapi.document import TITLE, documented, finished
from contrail_edge.routing import EdgeModule, Elsewhere, Operation, Route

StreamName = Annotated[
    str,
    BeforeValidator(percent_decode),
    Path(description="Name of the stream.", examples=["ORDERS"]),
]
ConsumerName = Annotated[
    str,
    BeforeValidator(percent_decode),
    Path(description="Name of the consumer.", examples=["billing"]),
]


class KitResponse(StarletteResponse):
    """Adapts an answer of the kit to FastAPI."""

    media_type = None

    def __init__(self, request: Request, answer: Answer) -> None:
        super().__init__(status_code=answer.status)
        self._request = request
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        await send_answer(self._request, self._answer, send)


def kit_request(request: StarletteRequest) -> Request:
    """Return the kit's request for a request of FastAPI."""
    inner: Request = request.scope[REQUEST_KEY]
    return inner


def answer(request: StarletteRequest, response: Answer) -> KitResponse:
    """Adapt ``response`` to the return type of management routes."""
    return KitResponse(kit_request(request), response)


class _ParsedRequest(StarletteRequest):
    """A request whose JSON body was read and decoded by the kit, within its limits."""

    def __init__(self, outer: StarletteRequest, raw: bytes, value: Any) -> None:
        super().__init__(outer.scope, outer.receive)
        self._raw = raw
        self._value = value

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._value


class JsonRoute(APIRoute):
    """A route whose body the kit reads: it checks size, Content-Type and nesting."""

    operation: Operation
    """The documentation of the route."""

    def get_route_handler(
        self,
    ) -> Callable[[StarletteRequest], Coroutine[Any, Any, StarletteResponse]]:
        """Return FastAPI's handler, behind one that reads the body first."""
        handle = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handle
        media_type = getattr(field.field_info, "media_type", JSON_TYPE)
        required = field.field_info.is_required()

        async def handle_parsed(request: StarletteRequest) -> StarletteResponse:
            inner = kit_request(request)
            settings: EdgeSettings = request.app.state.settings
            raw = await inner.body(settings.json_body_bytes_max)
            if not raw:
                if required:
                    raise ApiError(
                        errors.MALFORMED_BODY, f"a body of type {media_type} is required"
                    )
                # FastAPI would try to parse the empty body.
                return await handle(_ParsedRequest(request, raw, None))
            content_type(inner.headers.get(b"content-type"), (media_type,))
            return await handle(
                _ParsedRequest(request, raw, decode_untyped(raw, self.operation.body_values_max))
            )

        return handle_parsed


def management_router() -> APIRouter:
    """Return a router for management routes, whose bodies are pydantic models."""
    return APIRouter(route_class=JsonRoute)


class DeclaredRoutes:
    """The FastAPI application over the modules' management routes and the data-plane ``routes``."""

    def __init__(
        self, modules: Sequence[EdgeModule], routes: Iterable[Route], settings: EdgeSettings
    ) -> None:
        self._routes = tuple(routes)
        self._managed = [
            (module.management(), module.elsewhere)
            for module in modules
            if module.management is not None
        ]
        self.app = FastAPI(
            title=TITLE,
            version=__version__,
            redirect_slashes=False,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
        )
        self.app.state.settings = settings
        self._add_routes()
        self._build()
        self._document: dict[str, Any] | None = None  # made once, at the first request for it

    def _add_routes(self) -> None:
        for route in self._routes:
            self.app.router.add_api_route(
                route.template,
                _endpoint(route),
                methods=[route.method],
                **_declared(route.operation),
            )
        for router, _ in self._managed:
            self.app.include_router(router)
        self.app.add_exception_handler(ApiError, _on_refusal)
        self.app.add_exception_handler(RequestValidationError, _on_invalid)
        self.app.add_exception_handler(Exception, _on_failure)

    def _build(self) -> None:
        """Make what FastAPI makes at the first request, which takes longer than a step may."""
        self.app.middleware_stack = self.app.build_middleware_stack()
        scope = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []}
        for route in self.app.router.routes:
            route.matches(scope)

    def managed(self) -> Iterator[tuple[str, str, Elsewhere | None]]:
        """Yield method, path template and serving process of each management route."""
        for router, elsewhere in self._managed:
            for route in _managed_routes(router):
                for method in route.methods or ():
                    yield method, route.path, elsewhere

    def document(self) -> dict[str, Any]:
        """Return the OpenAPI document of all routes."""
        if self._document is None:
            operations = [route.operation for route in self._routes if route.operation is not None]
            for router, _ in self._managed:
                operations += [route.operation for route in _managed_routes(router)]
            self._document = finished(self.app.openapi(), operations)
        return self._document


def manage(
    router: APIRouter,
    method: str,
    template: str,
    endpoint: Callable[..., Coroutine[Any, Any, KitResponse]],
    operation: Operation,
) -> None:
    """Add a management route; its parameters and body are documented by the function itself."""
    router.add_api_route(template, endpoint, methods=[method], **_declared(operation))
    route = router.routes[-1]
    assert isinstance(route, JsonRoute)
    route.operation = operation


def _managed_routes(router: APIRouter) -> Iterator[JsonRoute]:
    for route in router.routes:
        assert isinstance(route, JsonRoute)
        yield route


def _declared(operation: Operation | None) -> dict[str, Any]:
    if operation is None:
        return {"include_in_schema": False}
    return {**documented(operation), "response_class": KitResponse}


def _endpoint(route: Route) -> Callable[[StarletteRequest], Coroutine[Any, Any, StarletteResponse]]:
    async def endpoint(request: StarletteRequest) -> StarletteResponse:
        inner = kit_request(request)
        inner.path_values = {
            name: percent_decode(value) for name, value in request.path_params.items()
        }
        return KitResponse(inner, await route.handler(inner))

    return endpoint


def _refused(request: StarletteRequest, error: ApiError) -> KitResponse:
    inner = kit_request(request)
    return KitResponse(inner, refusal(inner, error))


async def _on_refusal(request: StarletteRequest, error: Exception) -> StarletteResponse:
    assert isinstance(error, ApiError)
    return _refused(request, error)


async def _on_invalid(request: StarletteRequest, error: Exception) -> StarletteResponse:
    assert isinstance(error, RequestValidationError)
    return _refused(request, invalid_model(error.errors()))


async def _on_failure(request: StarletteRequest, error: Exception) -> StarletteResponse:
    del error  # logged where it ends up, outside FastAPI
    return _refused(request, ApiError(errors.INTERNAL))


def invalid_model(found: Iterable[Any]) -> ApiError:
    """Return the error for pydantic's errors, with pointers into the body or parameter names."""
    named = islice(found, FIELD_ERRORS_MAX)
    fields = [FieldProblem(_pointer(one["loc"]), _message(one)) for one in named]
    first = fields[0]
    detail = f"{first.pointer}: {first.message}" if first.pointer else first.message
    return ApiError(errors.INVALID_FIELD, detail, fields)


def _pointer(location: tuple[str | int, ...]) -> str:
    if location and location[0] == "body":
        return "".join(f"/{escape_pointer(str(step))}" for step in location[1:])
    return str(location[-1]) if location else ""


def _message(found: Any) -> str:
    if found["type"] == "extra_forbidden":
        return "unknown field"
    message: str = found["msg"]
    return message.removeprefix("Value error, ")
