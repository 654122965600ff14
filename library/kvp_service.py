#!/usr/bin/python
"""Ansible module: the services of a deployment."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kvp_service
short_description: Run cache server and engine of a kvpersist deployment
description:
  - Starts, restarts or stops a service through systemd or supervisor, and waits until the process that was started
    answers healthily.
  - A running service is restarted only when its process was started with other arguments or environment than the
    settings ask for, or when O(restart) says so.
options:
  settings:
    description: Values by Ansible variable, see docs/configuration.md. What is missing takes its default.
    type: dict
    required: true
  service:
    description: Which service. V(all) is for O(state=stopped).
    type: str
    required: true
    choices: [cache, engine, all]
  state:
    description: What it should be.
    type: str
    choices: [started, stopped]
    default: started
  namespace:
    description: Namespace of the engine as M(kvp_identity) returned it; without it that of the saved identity is taken.
    type: str
  restart:
    description: Restart a running service in any case, for example because its definition changed.
    type: bool
    default: false
  timeout:
    description: Seconds to wait for a healthy answer.
    type: int
    default: 600
author:
  - kvpersist authors
attributes:
  check_mode:
    description: Predicts start, restart or stop without doing it.
    support: full
  diff_mode:
    description: Shows what deviates in the running process.
    support: full
"""

EXAMPLES = r"""
- name: Run the cache server
  kvp_service:
    service: cache
    settings: "{{ kvp_settings }}"

- name: Stop everything
  kvp_service:
    service: all
    state: stopped
    settings: "{{ kvp_settings }}"
"""

RETURN = r"""
action:
  description: What was done, or in check mode would be done.
  returned: success
  type: str
  sample: restarted
reasons:
  description: Why.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError
from ansible.module_utils.kvpersist.core.settings import validate
from ansible.module_utils.kvpersist.host.convergence import converge_started, converge_stopped
from ansible.module_utils.kvpersist.host.deployment import deployment_of

ARGUMENT_SPEC = {
    "settings": {"type": "dict", "required": True},
    "service": {"type": "str", "required": True, "choices": ["cache", "engine", "all"]},
    "state": {"type": "str", "choices": ["started", "stopped"], "default": "started"},
    "namespace": {"type": "str"},
    "restart": {"type": "bool", "default": False},
    "timeout": {"type": "int", "default": 600},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    parameters = module.params
    try:
        deployment = deployment_of(validate(parameters["settings"], "managing services"))
        if parameters["state"] == "stopped":
            action = converge_stopped(deployment, parameters["service"], module.check_mode)
        else:
            action = converge_started(
                deployment,
                parameters["service"],
                parameters["namespace"],
                parameters["restart"],
                parameters["timeout"],
                module.check_mode,
            )
    except KvpError as error:
        module.fail_json(msg=str(error), exit_code=error.exit_code)
    module.exit_json(**action.as_result())


if __name__ == "__main__":
    main()
