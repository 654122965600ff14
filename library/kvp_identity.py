#!/usr/bin/python
"""Ansible module: the identity of a deployment."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kvp_identity
short_description: Derive and save the identity of a kvpersist deployment
description:
  - Hashes weights and tokenizer, reads the model's configuration, resolves what vLLM resolves, and computes the
    namespace under which the KV of exactly this deployment is stored.
  - Writes C(identity.env.local) into the folder that the setting C(kvp_config_dir) names, and in launch mode host
    the link C(<kvp_models_dir>/<kvp_model_family>/<namespace>) to the model's folder. Earlier links stay.
  - Keeps the identity and the environment files as they are now in the host's history, C(identities) in the state
    folder, from which M(kvp_rollback_info) reads them. That alone is reported as no change.
  - Digests of files are remembered by path, size, times and inode in C(hash-cache.jsonl) in the state folder, each as
    soon as it is known, so a run that was interrupted goes on where it was. C(kvpersist hash) on the host does the
    same with a progress bar.
  - Where the model was downloaded from Hugging Face, its commit is the revision unless one is set, and a large file
    whose SHA-256 is not the one that the download expected is an error.
options:
  settings:
    description: Values by Ansible variable, see docs/configuration.md. What is missing takes its default.
    type: dict
    required: true
  trust_hash_cache:
    description: Whether remembered digests are used. V(false) hashes every byte again.
    type: bool
    default: true
author:
  - kvpersist authors
attributes:
  check_mode:
    description: Hashes and compares, writes neither the file, the link, the hash cache nor the history.
    support: full
  diff_mode:
    description: Shows identity.env.local and the link before and after.
    support: full
"""

EXAMPLES = r"""
- name: Derive the identity
  kvp_identity:
    settings: "{{ kvp_settings }}"
  register: identity

- name: Show the namespace
  ansible.builtin.debug:
    var: identity.namespace
"""

RETURN = r"""
namespace:
  description: Namespace of this deployment, or the operator's override.
  returned: success
  type: str
  sample: kvp-0123456789abcdef0123456789abcdef
model_path:
  description: Value of C(--model), under which the KV is stored.
  returned: success
  type: str
  sample: /models/mimo-pro/kvp-0123456789abcdef0123456789abcdef
identity:
  description: Every identity field with its value.
  returned: success
  type: dict
sources:
  description:
    - How each field is known. C(given), the inventory says so; C(derived), computed from the model's files; C(engine),
      read from its environment; C(image), its digest; C(fixed), the same in every deployment of this version.
  returned: success
  type: dict
differences:
  description: Fields that differ from the identity saved before, each with C(name), C(old) and C(new).
  returned: success
  type: list
  elements: dict
explanation:
  description:
    - What the differences mean, null where there are none. C(old) and C(new) namespace, C(reusable), C(changes) with
      C(change) and C(effect) of each, C(stored) with C(objects), C(bytes) and the command C(remove) of the old
      namespace, and all of it as C(lines).
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError
from ansible.module_utils.kvpersist.core.settings import validate
from ansible.module_utils.kvpersist.host.deployment import deployment_of
from ansible.module_utils.kvpersist.host.identity import save_identity

ARGUMENT_SPEC = {
    "settings": {"type": "dict", "required": True},
    "trust_hash_cache": {"type": "bool", "default": True},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        deployment = deployment_of(validate(module.params["settings"], "deriving the identity"))
        saved = save_identity(deployment, module.params["trust_hash_cache"], module.check_mode)
    except KvpError as error:
        module.fail_json(msg=str(error), exit_code=error.exit_code)
    for warning in saved.warnings:
        module.warn(warning)
    module.exit_json(**saved.as_result())


if __name__ == "__main__":
    main()
