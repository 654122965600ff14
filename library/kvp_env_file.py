#!/usr/bin/python
"""Ansible module: one environment file of a deployment."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kvp_env_file
short_description: Render one environment file of a kvpersist deployment
description:
  - Validates all settings of a deployment and writes those that belong to one environment file, with their meaning as
    comments, in one atomic step and with mode 0600.
  - Every wrong setting is named in one message; then nothing is written.
options:
  settings:
    description: Values by Ansible variable, see docs/configuration.md. What is missing takes its default.
    type: dict
    required: true
  file:
    description: Which file to write. It lies in the folder that the setting C(kvp_config_dir) names.
    type: str
    required: true
    choices: [cache.env.local, lmcache-server.env, tp4.env]
author:
  - kvpersist authors
attributes:
  check_mode:
    description: Predicts the change and its diff without writing.
    support: full
  diff_mode:
    description: Shows the content before and after.
    support: full
"""

EXAMPLES = r"""
- name: Render the cache server's environment
  kvp_env_file:
    file: lmcache-server.env
    settings: "{{ kvp_settings }}"
"""

RETURN = r"""
path:
  description: Where the file lies.
  returned: success
  type: str
  sample: /etc/kvpersist/lmcache-server.env
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError
from ansible.module_utils.kvpersist.core.settings import FILES, render_file, validate
from ansible.module_utils.kvpersist.host.deployment import deployment_of
from ansible.module_utils.kvpersist.host.managed import manage_file

ARGUMENT_SPEC = {
    "settings": {"type": "dict", "required": True},
    "file": {"type": "str", "required": True, "choices": list(FILES)},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    name = module.params["file"]
    try:
        values = validate(module.params["settings"], f"rendering {name}")
        deployment = deployment_of(values)
        path = f"{deployment.config_dir}/{name}"
        change = manage_file(path, render_file(name, values), module.check_mode)
    except KvpError as error:
        module.fail_json(msg=str(error), exit_code=error.exit_code)
    module.exit_json(path=path, **change.as_result())


if __name__ == "__main__":
    main()
