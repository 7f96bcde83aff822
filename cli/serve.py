"""``qkv-engine serve``: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv_engine.errors import ConfigError, QKVError, remedy_of_extra
from qkv_engine.sizes import parse_size

from . import common
from .demo_questions import QUESTIONS
from .log import JSON, TEXT, note
from .model import check_shape

if TYPE_CHECKING:
    from qkv_engine.serve.keys import Keys
    from qkv_engine.serve.limits import Limits

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
_LIMITS = ("max_requests", "max_connections", "read_timeout", "request_timeout", "drain_timeout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``serve``."""
    parser.epilog = (
        "docs/serving.md shows clients, the fields of requests, the metrics, and what to do before others may call. "
        "SIGTERM and Ctrl-C end it once the requests under way have finished."
    )
    common.add_model_arguments(parser, caches_prefixes=True)
    common.add_fit_arguments(parser)
    parser.set_defaults(warm_up="full")
    _add_batching(parser)
    _add_access(parser)
    _add_limits(parser)
    _add_log(parser)


def _add_batching(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batching").add_argument
    add("--max-num-seqs", type=int, metavar="N", help="completions that run at once (default: 256)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens of one step (default: 2048)")
    add(
        "--kv-quota",
        type=float,
        metavar="SHARE",
        help="share of each tenant in KV memory, host memory and store",
    )
    add("--shape", metavar="NAME", help="random weights of a known shape instead of MODEL, to measure a server with")
    add(
        "--replicas",
        metavar="N",
        help="engines on a Ray cluster, such as 4, or 2..8 to follow the load (docs/scale.md)",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("access").add_argument
    add("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s, this machine alone)")
    add("--port", type=int, default=DEFAULT_PORT, metavar="N", help="port, 0 for a free one (default: %(default)s)")
    add("--served-name", action="append", metavar="NAME", help="name of the model for clients (default: MODEL)")
    add("--api-key", action="append", metavar="KEY", help="a key that clients must have; other users see it in ps")
    add("--api-key-file", type=Path, metavar="FILE", help="file with a line TENANT KEY, or KEY, for each key")
    add("--no-api-key", action="store_true", help="let anybody who reaches --host call, on any address")
    add("--admin-key-file", type=Path, metavar="FILE", help="file with the key of who may POST /admin/resize")
    add("--allow-origin", action="append", metavar="URL", help="site whose pages may call it from a browser (CORS)")
    add("--allow-host", action="append", metavar="NAME", help="name that a server without keys answers to")
    add("--no-page", action="store_true", help="leave out the chat at /")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add("--max-requests", type=int, metavar="N", help="completions running and waiting; more get 429 (default: 1024)")
    add("--max-body", metavar="SIZE", help="longest body of a request; more get 413 (default: 8MiB)")
    add(
        "--response-memory", metavar="SIZE", help="responses kept for previous_response_id, 0 for none (default: 64MiB)"
    )
    add("--max-connections", type=int, metavar="N", help="open connections (default: 4096)")
    add(
        "--read-timeout", type=float, metavar="S", help="seconds to send headers, then a body, or to read (default: 20)"
    )
    add("--request-timeout", type=float, metavar="S", help="seconds after which a request ends (default: 3600)")
    add("--drain-timeout", type=float, metavar="S", help="seconds to finish requests after SIGTERM (default: 30)")


def _add_log(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("log").add_argument
    add("--log-format", choices=(TEXT, JSON), default=TEXT, help="lines, or an object a line (default: %(default)s)")
    add("--access-log", action="store_true", help="log a line a request: method, path, status, time and id")


def run(args: argparse.Namespace) -> int:
    """Serve as ``args`` say until a signal."""
    server = _require("qkv_engine.serve.server", "serve")
    make_app = _require("qkv_engine.serve.app", "serve").make_app
    check_shape(args)
    limits, keys, sites, admin_key = _limits(args), _keys(args), _sites(args), _admin_key(args)
    if args.replicas is not None:
        return _run_replicas(args, limits, keys, sites)
    sock = server.bind(args.host, args.port)
    with sock:
        name = args.shape or args.model or common.DEMO
        note(f"loading {name}")
        with common.open_engine(args, **engine_options(args), resizable=admin_key is not None) as engine:
            for line in engine.describe() if not args.verbose else ():  # which logs them
                note(line)
            _log_to_stderr(args)
            names = args.served_name or [name]
            sys.setswitchinterval(server.SWITCH_SECONDS)
            app = make_app(engine, names, limits=limits, keys=keys, admin_key=admin_key, **sites)
            running = server.Server(app, sock, limits)
            server.keep_for_life()
            note(f"serving {names[0]} on {server.url_of(sock)}")
            running.run()
    return common.EXIT_OK


def _run_replicas(args: argparse.Namespace, limits: Limits, keys: Keys, sites: dict[str, Any]) -> int:
    """Serve replicas on the Ray cluster of this machine, or on this machine alone, until a signal."""
    if args.access_log:
        raise ConfigError("replicas have no access log", field="access_log", remedy="Ray keeps its own, in its folder")
    deployment = _require("qkv_engine.cluster.deployment", "ray")
    replicas = deployment.Replicas.parse(args.replicas)
    options = common.engine_options(args) | engine_options(args)
    names = args.served_name or [args.shape or args.model or common.DEMO]
    deployment.connect(is_verbose=args.verbose or args.debug)
    note(f"starting {args.replicas} replicas of {names[0]}")
    access = {"host": args.host, "port": args.port, "limits": limits, "keys": keys}
    try:
        fronts = deployment.start(replicas, options, names, **access, sites=sites)
        note(f"serving {names[0]} on http://{args.host}:{args.port}")
        try:
            signal.pause()
        finally:
            note(f"requests under way have {limits.drain_timeout:g} s to finish; Ctrl-C again ends them")
            asyncio.run(deployment.drain(fronts, limits.drain_timeout))
    finally:
        deployment.stop()
    return common.EXIT_OK


def _require(module: str, extra: str) -> Any:
    """The module. Raises ``QKVError`` where what it needs, the packages of ``extra``, is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise QKVError(
            f"serve needs a package that is not installed: {error.name}", remedy=remedy_of_extra(extra)
        ) from error


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the engine beyond those of other commands."""
    names = ("max_num_seqs", "max_num_batched_tokens", "kv_quota")
    found = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return found if args.shape is None else found | {"model": args.shape, "load_format": "random"}


def _limits(args: argparse.Namespace) -> Limits:
    from qkv_engine.serve.limits import Limits

    given = {name: getattr(args, name) for name in _LIMITS if getattr(args, name) is not None}
    if args.max_body is not None:
        given["max_body"] = parse_size(args.max_body, field="max_body", free=Limits.max_body)
    if (size := args.response_memory) is not None:
        given["response_memory"] = 0 if size == "0" else parse_size(size, field="response_memory", free=None)
    return Limits(**given)


def _keys(args: argparse.Namespace) -> Keys:
    """The keys. Raises ``ConfigError`` where others could call and no key is asked for."""
    from qkv_engine.serve.keys import Keys, read_keys

    found = [(f"api-key-{number}", key) for number, key in enumerate(args.api_key or (), 1)]
    if args.api_key_file is not None:
        found += read_keys(args.api_key_file)
    if not found and not args.no_api_key and not _is_loopback(args.host):
        remedy = "Give --api-key-file, or --no-api-key to let anybody call"
        raise ConfigError("others could call without a key", field="host", value=args.host, remedy=remedy)
    return Keys(found)


def _admin_key(args: argparse.Namespace) -> str | None:
    """The admin key, if there is one. Raises ``ConfigError`` for a file without a key, and beside replicas."""
    from qkv_engine.serve.keys import read_keys

    path = args.admin_key_file
    if path is not None and args.replicas is not None:
        raise ConfigError("replicas have no admin requests", field="admin_key_file", value=str(path))
    return None if path is None else read_keys(path)[0][1]


def _sites(args: argparse.Namespace) -> dict[str, Any]:
    """The app's options for browsers: origins, hosts, the chat page. Raises ``ConfigError``."""
    from qkv_engine.serve.hosts import check_origin

    hosts, origins = [args.host, *(args.allow_host or ())], [check_origin(url) for url in args.allow_origin or ()]
    is_demo = args.shape is None and args.model is None
    examples = QUESTIONS if is_demo else ()
    return {"allow_origins": origins, "allow_hosts": hosts, "page": not args.no_page, "examples": examples}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _log_to_stderr(args: argparse.Namespace) -> None:
    """Sends uvicorn's log the way of the engine's; a line a request with ``--access-log`` or ``--verbose``."""
    if args.access_log:
        logging.getLogger("qkv_engine.access").setLevel(logging.INFO)
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = logging.getLogger("qkv_engine").handlers
    logger.propagate = False
    logger.setLevel(logging.INFO if args.verbose or args.debug else logging.WARNING)
