#!/usr/bin/python
"""Ansible module: an earlier deployment of this host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kvp_rollback_info
short_description: Read an earlier kvpersist deployment from the host's history
description:
  - Finds the deployment that had a namespace, checks that its model is still there and that its settings still lead to
    that namespace, and returns these settings. Reads only.
  - Fails where the namespace is unknown to this host, and names the fields where model or versions have changed.
options:
  settings:
    description: Values by Ansible variable, see docs/configuration.md. What is missing takes its default.
    type: dict
    required: true
  namespace:
    description: Namespace to go back to, as C(kvpersist identity history) lists it.
    type: str
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
- name: Read what was deployed under an earlier namespace
  kvp_rollback_info:
    namespace: kvp-0123456789abcdef0123456789abcdef
    settings: "{{ kvp_settings }}"
  register: earlier
"""

RETURN = r"""
namespace:
  description: The namespace that was asked for.
  returned: success
  type: str
  sample: kvp-0123456789abcdef0123456789abcdef
model_path:
  description: Value of C(--model) with it.
  returned: success
  type: str
  sample: /models/mimo-pro/kvp-0123456789abcdef0123456789abcdef
values:
  description: Every setting of that deployment, by Ansible variable.
  returned: success
  type: dict
differences:
  description: Settings whose value now is another than then, each with C(name), C(now) and C(then).
  returned: success
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError
from ansible.module_utils.kvpersist.core.settings import validate
from ansible.module_utils.kvpersist.host.identity import plan_rollback

ARGUMENT_SPEC = {
    "settings": {"type": "dict", "required": True},
    "namespace": {"type": "str", "required": True},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        rollback = plan_rollback(validate(module.params["settings"], "planning a rollback"), module.params["namespace"])
    except KvpError as error:
        module.fail_json(msg=str(error), exit_code=error.exit_code)
    module.exit_json(**rollback.as_result())


if __name__ == "__main__":
    main()
