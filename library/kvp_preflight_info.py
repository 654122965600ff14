#!/usr/bin/python
"""Ansible module: what keeps a host from running a deployment."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kvp_preflight_info
short_description: Find what keeps a host from running a kvpersist deployment
description:
  - Checks settings, programs, model folder, disk and ports of a host and reports every problem at once, each with what
    to do about it. Looks only; changes nothing.
options:
  settings:
    description: Values by Ansible variable, see docs/configuration.md. What is missing takes its default.
    type: dict
    required: true
  variables:
    description: Names of all variables of the inventory that start like a setting; one that none is called is an error.
    type: list
    elements: str
    default: []
author:
  - kvpersist authors
attributes:
  check_mode:
    description: The module only looks.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
"""

EXAMPLES = r"""
- name: Look for problems
  kvp_preflight_info:
    settings: "{{ kvp_settings }}"
    variables: "{{ query('ansible.builtin.varnames', '^(cache_server|kvp|vllm_engine)_') }}"
  register: preflight
"""

RETURN = r"""
problems:
  description: One line per problem, with what to do about it; empty when the host is ready.
  returned: success
  type: list
  elements: str
warnings:
  description: What an operator should know and may accept, one line each; absent where there is nothing.
  returned: when there is any
  type: list
  elements: str
service_manager:
  description: Who keeps the services running on this host, C(systemd) or C(supervisor).
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError
from ansible.module_utils.kvpersist.core.settings import validate
from ansible.module_utils.kvpersist.host.deployment import deployment_of
from ansible.module_utils.kvpersist.host.preflight import preflight_problems, preflight_warnings
from ansible.module_utils.kvpersist.host.services import resolved_manager, service_manager

ARGUMENT_SPEC = {
    "settings": {"type": "dict", "required": True},
    "variables": {"type": "list", "elements": "str", "default": []},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        deployment = deployment_of(
            validate(module.params["settings"], "checking the settings", module.params["variables"])
        )
        problems = preflight_problems(deployment, service_manager(deployment))
        for warning in preflight_warnings(deployment):
            module.warn(warning)
    except KvpError as error:
        module.fail_json(msg=str(error), exit_code=error.exit_code)
    module.exit_json(changed=False, problems=problems, service_manager=resolved_manager(deployment.service_manager))


if __name__ == "__main__":
    main()
