"""Log browsers in and out, and show the API page to those who are logged in."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from mlbench_master.access.credentials import CODE_S, Access
from mlbench_master.access.guard import TOO_MANY_GUESSES, client_address
from mlbench_master.access.proxies import root_path
from mlbench_master.api.bodies import read_login
from mlbench_master.web.render import page, render

__all__ = ["add_login", "login_path"]

_WRONG_CODE = (
    "This address has been used before or has expired. "
    "'mlbench get-dashboard-url --login' prints a new one; you can also enter the token."
)
_TOO_MANY_GUESSES = "Too many wrong tokens came from your address. Try again in a minute."


def login_path(access: Access) -> str:
    """Return the path of an address that logs a browser in once."""
    if access.token is None:
        return "/"
    return f"/login/?code={access.new_code()}"


def add_login(app: FastAPI, access: Access) -> None:
    """Add the login and the API page to an application.

    Args:
        app: The application.
        access: Who may use it.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/login/")
    def login_page(request: Request, code: str = "") -> Response:
        # A program that only looks at an address, such as a preview, must not use up its code.
        if not code or request.method != "GET" or request.scope.get("is_head"):
            return render("login.html", root=root_path(request.scope), message="")
        if access.token is None or access.has_session(request.headers):
            return RedirectResponse("/", status_code=303)
        return _answer(request, access.redeem(code), _WRONG_CODE)

    @router.post("/login/")
    def login(request: Request, form: Annotated[dict[str, str], Depends(read_login)]) -> Response:
        if access.token is None:
            return RedirectResponse("/", status_code=303)
        address = client_address(request.scope)
        # Before the token is compared: an address that has to wait learns nothing about its guess.
        if access.must_wait(address):
            return render(
                "login.html",
                root=root_path(request.scope),
                status=429,
                headers=TOO_MANY_GUESSES,
                message=_TOO_MANY_GUESSES,
            )
        is_right = access.accepts(form.get("token", ""))
        if not is_right:
            access.count_guess(address)
        return _answer(request, is_right, "This is not the master's token.")

    @router.post("/logout/")
    def logout(request: Request) -> Response:
        access.close_session(request.headers)
        # 303 lets the browser continue with GET after this POST.
        response = RedirectResponse("/login/", status_code=303)
        response.delete_cookie(access.cookie)
        return response

    @router.post("/api/login/", status_code=201)
    def new_login() -> dict[str, Any]:
        return {"path": login_path(access), "expires_s": CODE_S}

    @router.get("/openapi.json")
    def description(request: Request) -> dict[str, Any]:
        return _description(app, root_path(request.scope))

    @router.get("/docs/")
    def api_page(request: Request) -> HTMLResponse:
        return page(request, "api.html", api=app.openapi())

    def _answer(request: Request, is_right: bool, problem: str) -> Response:
        if not is_right:
            return render("login.html", root=root_path(request.scope), status=401, message=problem)
        response = RedirectResponse("/", status_code=303)
        # Scripts cannot read the cookie, and links from other sites do not send it.
        response.set_cookie(
            access.cookie,
            access.open_session(),
            httponly=True,
            samesite="strict",
            # Browsers ignore a secure cookie that arrives over plain HTTP from another machine.
            secure=request.url.scheme == "https",
        )
        return response

    app.include_router(router)


def _description(app: FastAPI, root: str) -> dict[str, Any]:
    # A copy, because FastAPI keeps the schema for all requests, and the root is that of one proxy.
    schema = {**app.openapi()}
    if root:
        schema["servers"] = [{"url": root}]
    return schema
