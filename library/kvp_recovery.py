#!/usr/bin/python
"""Ansible module: the restart acceptance test."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kvp_recovery
short_description: Prove that the KV cache of a kvpersist deployment survives restarts
description:
  - Sends a prompt that was never sent before, proves that its KV reached the disk, restarts the engine (scenario A) or
    kills the cache server with SIGKILL and restarts both (scenario B), and sends the same prompt again.
  - PASS needs all the evidence, among it cached tokens, disk reads in the server's log and counters, an equal answer, a
    cache that did not grow, and a shorter time to the first token.
  - The services are restarted, so the result is always changed.
options:
  settings:
    description: Values by Ansible variable, see docs/configuration.md. What is missing takes its default.
    type: dict
    required: true
  scenarios:
    description: Which scenarios, in this order.
    type: list
    elements: str
    choices: [A, B]
    default: [A, B]
  prompt_tokens:
    description: About how many tokens the prompt has.
    type: int
    default: 2000
  expected_answer:
    description: Text that a right answer to the question about the capital of France contains; empty for none.
    type: str
    default: ''
  timeout:
    description: Seconds to wait for one service or one answer.
    type: int
    default: 900
author:
  - kvpersist authors
attributes:
  check_mode:
    description: Says that the services would be restarted, and does nothing.
    support: full
  diff_mode:
    description: There is no content to compare.
    support: none
"""

EXAMPLES = r"""
- name: Prove recovery after both were restarted
  kvp_recovery:
    settings: "{{ kvp_settings }}"
    scenarios: [B]
    expected_answer: Paris
"""

RETURN = r"""
verdict:
  description: C(PASS), C(FAIL) or C(INCONCLUSIVE).
  returned: when the test ran
  type: str
exit_code:
  description: 0 PASS, 1 FAIL, 5 INCONCLUSIVE, or the code of the error that ended the run.
  returned: when the test ran or failed
  type: int
folder:
  description: Folder of the evidence.
  returned: when the test ran
  type: str
outcomes:
  description: Verdict of each scenario with C(failures) and C(missing) evidence.
  returned: when the test ran
  type: list
  elements: dict
summary:
  description: Rows of the closing table, each a name and a value.
  returned: when the test ran
  type: list
  elements: list
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError
from ansible.module_utils.kvpersist.core.recovery import SCENARIOS, exit_code, summary_rows
from ansible.module_utils.kvpersist.core.settings import validate
from ansible.module_utils.kvpersist.host.deployment import deployment_of
from ansible.module_utils.kvpersist.host.recovery import Plan, check_plan, run_recovery
from ansible.module_utils.kvpersist.host.services import service_manager

ARGUMENT_SPEC = {
    "settings": {"type": "dict", "required": True},
    "scenarios": {"type": "list", "elements": "str", "choices": list(SCENARIOS), "default": list(SCENARIOS)},
    "prompt_tokens": {"type": "int", "default": 2000},
    "expected_answer": {"type": "str", "default": ""},
    "timeout": {"type": "int", "default": 900},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    parameters = module.params
    plan = Plan(
        scenarios=tuple(parameters["scenarios"]),
        prompt_tokens=parameters["prompt_tokens"],
        expected_answer=parameters["expected_answer"],
        timeout_s=float(parameters["timeout"]),
    )
    try:
        deployment = deployment_of(validate(parameters["settings"], "running the recovery test"))
        check_plan(deployment, plan)
        if module.check_mode:
            module.exit_json(changed=True, msg=f"would restart the services for {', '.join(plan.scenarios)}")
        result = run_recovery(deployment, service_manager(deployment), plan, module.log)
    except KvpError as error:
        module.fail_json(msg=str(error), exit_code=error.exit_code)
    code = exit_code(result["verdict"])
    answer = {
        "changed": True,
        "exit_code": code,
        "verdict": result["verdict"],
        "folder": result["folder"],
        "outcomes": result["outcomes"],
        "summary": [list(row) for row in summary_rows(result)],
    }
    if code:
        reasons = [text for outcome in result["outcomes"] for text in (*outcome["failures"], *outcome["missing"])]
        module.fail_json(
            msg=f"proving recovery: {result['verdict']}: {'; '.join(reasons)}. See {result['folder']}.", **answer
        )
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
