#!/usr/bin/python
"""Ansible module: the file in which an L2 backend keeps its slots."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kvp_l2_file
short_description: Allocate the file that the L2 backend of a kvpersist deployment expects
description:
  - The backend V(raw_block) keeps all objects in one file of the size of the budget, below the folder that the setting
    C(kvp_cache_root) names. The file is made with mode 0600 and all its blocks, or brought to another size; what it
    holds up to there stays.
  - For every other backend there is nothing to do.
options:
  settings:
    description: Values by Ansible variable, see docs/configuration.md. What is missing takes its default.
    type: dict
    required: true
author:
  - kvpersist authors
attributes:
  check_mode:
    description: Predicts size and mode without touching the file.
    support: full
  diff_mode:
    description: Shows size and mode before and after.
    support: full
"""

EXAMPLES = r"""
- name: Allocate the file of the L2 backend
  kvp_l2_file:
    settings: "{{ kvp_settings }}"
"""

RETURN = r"""
path:
  description: Where the file lies.
  returned: when the backend has one
  type: str
  sample: /var/lib/kv-persistence/l2/raw-block.data
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError
from ansible.module_utils.kvpersist.core.settings import validate
from ansible.module_utils.kvpersist.host.deployment import deployment_of
from ansible.module_utils.kvpersist.host.l2_tier import manage_backing_file

ARGUMENT_SPEC = {"settings": {"type": "dict", "required": True}}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        deployment = deployment_of(validate(module.params["settings"], "allocating the file of the L2 backend"))
        change = manage_backing_file(deployment, module.check_mode)
    except KvpError as error:
        module.fail_json(msg=str(error), exit_code=error.exit_code)
    if change is None:
        module.exit_json(changed=False)
    module.exit_json(path=change.path, **change.as_result())


if __name__ == "__main__":
    main()
