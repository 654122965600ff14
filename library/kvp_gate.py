#!/usr/bin/python
"""Ansible module: the identity gate."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kvp_gate
short_description: Compare what runs with the identity of a kvpersist deployment
description:
  - Reads the arguments of the processes that really run, the model folder that the engine serves, the installed
    versions and the cache server's registrations, and compares each with C(identity.env.local).
  - Fails on a mismatch, since the cache must then not be reused, and when something could not be read. Reads only.
options:
  settings:
    description: Values by Ansible variable, see docs/configuration.md. What is missing takes its default.
    type: dict
    required: true
author:
  - kvpersist authors
attributes:
  check_mode:
    description: The module only reads.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
"""

EXAMPLES = r"""
- name: Verify the running engine
  kvp_gate:
    settings: "{{ kvp_settings }}"
"""

RETURN = r"""
verdict:
  description: C(verified), C(mismatch) or C(inconclusive).
  returned: when the gate ran
  type: str
exit_code:
  description: 0 verified, 4 mismatch, 5 inconclusive.
  returned: always
  type: int
differences:
  description: Facts with two values, each with C(name), C(identity) and C(running).
  returned: when the gate ran
  type: list
  elements: dict
unreadable:
  description: Facts that could not be read, by name, each with C(cause) and C(fix).
  returned: when the gate ran
  type: dict
checked:
  description: Names of the facts that agree.
  returned: when the gate ran
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError
from ansible.module_utils.kvpersist.core.settings import validate
from ansible.module_utils.kvpersist.host.deployment import deployment_of, load_identity
from ansible.module_utils.kvpersist.host.gate import run_gate

ARGUMENT_SPEC = {"settings": {"type": "dict", "required": True}}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        deployment = deployment_of(validate(module.params["settings"], "running the identity gate"))
        verdict = run_gate(deployment, load_identity(deployment.config_dir))
    except KvpError as error:
        module.fail_json(msg=str(error), exit_code=error.exit_code)
    result = {"changed": False, "exit_code": verdict.exit_code, **verdict.as_dict()}
    if verdict.exit_code:
        module.fail_json(msg=" ".join(f"{line.rstrip('.')}." for line in verdict.lines()), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
