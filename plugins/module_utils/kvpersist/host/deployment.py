"""Reads a deployment back from the files that the playbook rendered."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..core.deployment import Deployment, deployment_from_values
from ..core.engine_args import check_extra_args
from ..core.errors import InconclusiveError, UsageError
from ..core.identity import IDENTITY_ENV, Identity, identity_from_env, sources_from_env
from ..core.settings import FILES, Value, read_files
from .files import read_text


def load_values(config_dir: str, environment: Mapping[str, str]) -> dict[str, Value]:
    """Settings of the deployment whose files lie in ``config_dir``, by Ansible variable.

    Args:
        environment: the process environment, whose variables win over the files.

    Raises:
        UsageError: when the folder holds no deployment, or a value is wrong.
    """
    if not os.path.isdir(config_dir):
        raise UsageError(
            f"reading the deployment in {config_dir}",
            "there is no such folder",
            "Deploy with ansible-playbook site.yml, or give --config-dir.",
        )
    config_dir = os.path.abspath(config_dir)
    texts = {name: read_text(f"{config_dir}/{name}") for name in FILES}
    return read_files(texts, environment, config_dir)


def load_deployment(config_dir: str, environment: Mapping[str, str]) -> Deployment:
    """The deployment whose files lie in ``config_dir``; see :func:`load_values`."""
    return deployment_of(load_values(config_dir, environment))


def deployment_of(values: Mapping[str, Value]) -> Deployment:
    """The deployment that typed settings describe.

    Raises:
        UsageError: when settings contradict each other.
    """
    deployment = deployment_from_values(values)
    check_extra_args(deployment.engine.extra_args)
    return deployment


def load_identity(config_dir: str) -> Identity:
    """The identity in ``config_dir``.

    Raises:
        InconclusiveError: when there is none.
        UsageError: when it is malformed.
    """
    path = f"{config_dir}/{IDENTITY_ENV}"
    if not os.path.exists(path):
        raise InconclusiveError(f"reading {path}", "no such file", "Run the playbook with --tags identity.")
    return identity_from_env(read_text(path), path)


def load_sources(config_dir: str) -> dict[str, str]:
    """How each field of the identity in ``config_dir`` is known, by name; empty where that was not recorded.

    Raises:
        UsageError: when there is no identity or it is malformed.
    """
    path = f"{config_dir}/{IDENTITY_ENV}"
    return sources_from_env(read_text(path), path)
