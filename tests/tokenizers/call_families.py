"""Chat templates written for the tests with what the published ones use around calls, marks of the family included."""

# ruff: noqa: RUF001 - DeepSeek's marks have wide characters

from __future__ import annotations

from tests.tokenizers.literal_families import LITERAL_FAMILIES

_QWEN3_CODER = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- if system is defined or tools %}{{- '<|im_start|>system\\n' ~ (system | default('')) }}
    {%- for tool in tools or [] %}
        {{- '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>' }}
        {%- for name, value in tool.function.parameters.properties | items %}
            {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>\\n<type>' ~ (value.type | string) ~ '</type>' }}
        {%- endfor %}
        {{- '\\n</function>' }}
    {%- endfor %}
    {%- if tools %}
        {{- '\\nCall as\\n<tool_call>\\n<function=f>\\n<parameter=k>\\nv\\n</parameter>\\n</function>\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in turns %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content | trim %}{{- '\\n' + message.content | trim + '\\n' }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_GLM45 = """[gMASK]<sop>
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{name}
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
        {{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
    {%- elif m.role == 'assistant' %}{{- '<|assistant|>' }}
        {%- if loop.index0 > last.user and m.reasoning_content %}
            {{- '\\n<think>' + m.reasoning_content.strip() + '</think>' }}
        {%- else %}{{- '\\n<think></think>' }}{%- endif %}
        {%- if m.content.strip() %}{{- '\\n' + m.content.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson(ensure_ascii=False) }}{{- '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- elif m.role == 'system' %}{{- '<|system|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}
"""

_DEEPSEEK_V3 = """{% set ns = namespace(first=true, after_tool=false, system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.after_tool = false %}{{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is none %}
        {%- set ns.after_tool = false %}{%- set ns.first = true %}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' if ns.first else '\\n' }}{%- set ns.first = false %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'].split('</think>')[-1] %}
        {{- ('<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>') + content + '<｜end▁of▁sentence｜>' }}
        {%- set ns.after_tool = false %}
    {%- elif message['role'] == 'tool' %}
        {{- '\\n' if ns.after_tool else '<｜tool▁outputs▁begin｜>' }}{%- set ns.after_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.after_tool %}{{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""

_DEEPSEEK_V31 = """{% set ns = namespace(system='', after_user=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message['content'] %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.after_user = true %}{{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<｜Assistant｜></think>' if ns.after_user else '' }}{%- set ns.after_user = false %}
        {{- message['content'].split('</think>')[-1] }}
        {%- for tool in message['tool_calls'] or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
            {{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.after_user %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') }}
{%- endif %}
"""

_MINIMAX_M2 = """
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = 'You help.' %}{%- set turns = messages %}{%- endif %}
{%- set last = namespace(user=-1, call=none) %}
{%- for m in turns %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{{- ']~!b[]~b]system\\n' + system }}
{%- if tools %}{{- '\\n<tools>\\n' }}
    {%- for tool in tools %}{{- '<tool>' + tool.function | tojson + '</tool>\\n' }}{%- endfor %}
    {{- '</tools>\\n<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="k">v</parameter>\\n</invoke>' }}
    {{- '\\n</minimax:tool_call>' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- for m in turns %}
    {%- if m.role == 'assistant' %}{{- ']~b]ai\\n' }}
        {%- if m.reasoning_content and loop.index0 > last.user %}
            {{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- if m.tool_calls %}{%- set last.call = m.tool_calls[-1].function.name %}{{- '\\n<minimax:tool_call>\\n' }}
            {%- for call in m.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- for key, value in call.function.arguments | items %}
                    {{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) }}
                    {{- '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>\\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if last.call is none %}{{- raise_exception('nobody asked') }}{%- endif %}
        {%- if loop.first or turns[loop.index0 - 1].role != 'tool' %}{{- ']~b]tool' }}{%- endif %}
        {{- '\\n<response>' + m.content + '</response>' }}
        {%- if loop.last or turns[loop.index0 + 1].role != 'tool' %}{{- '[e~[\\n' }}{%- endif %}
    {%- elif m.role == 'user' %}{{- ']~b]user\\n' + m.content + '[e~[\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}
"""

_KIMI_K2 = """
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}
        <|im_system|>system<|im_middle|>You are an assistant.<|im_end|>
    {%- endif -%}
    {%- set name = message.get('name') or message['role'] -%}
    {%- if message['role'] == 'user' -%}<|im_user|>{{ name }}<|im_middle|>
    {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ name }}<|im_middle|>
    {%- else -%}<|im_system|>{{ name }}<|im_middle|>{%- endif -%}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        {{ message['content'] }}<|tool_calls_section_begin|>
        {%- for call in message['tool_calls'] -%}
            <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
            {%- if call['function']['arguments'] is string -%}{{ call['function']['arguments'] }}
            {%- else -%}{{ call['function']['arguments'] | tojson }}{%- endif -%}<|tool_call_end|>
        {%- endfor -%}<|tool_calls_section_end|>
    {%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}
{{ message['content'] }}
    {%- elif message['content'] is not none -%}{{ message['content'] }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

_GRANITE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = 'You are a helpful assistant.' %}{%- set turns = messages %}
{%- endif %}
{%- if tools %}
    {%- set system = system + ' Respond with <|tool_call|> followed by a JSON list of tools used.' %}
{%- endif %}
{%- if thinking %}
    {%- set system = system + " Write 'Here is my thought process:' and 'Here is my response:'." %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in turns %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<|tool_call|>[' if loop.first else ', ' }}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
        {{- ']' if loop.last else '' }}
    {%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""

_COMMAND_R7B = """{{ bos_token }}
{%- set count = namespace(calls=0, seen=[]) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble\\n' }}
{%- for tool in tools or [] %}
    {{- '{"name": "' ~ tool['function']['name'] ~ '", "parameters": ' }}
    {{- tool['function']['parameters'] | tojson ~ '}\\n' }}
{%- endfor %}
{{- system + '<|END_OF_TURN_TOKEN|>' }}
{%- for message in turns %}
    {%- if message.role == 'system' %}
        {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>' ~ message.tool_plan ~ '<|END_THINKING|>' }}
        {{- '<|START_ACTION|>[\\n' }}
        {%- for tc in message.tool_calls %}
            {{- '    {"tool_call_id": "' ~ count.calls ~ '", "tool_name": "' ~ tc['function']['name'] }}
            {{- '", "parameters": ' ~ tc['function']['arguments'] | tojson ~ '}' ~ ('' if loop.last else ',') ~ '\\n' }}
            {%- set count.calls = count.calls + 1 %}
        {%- endfor %}
        {{- ']<|END_ACTION|><|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' + message.content }}
        {{- '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'tool' and message.tool_call_id not in count.seen %}
        {%- set count.seen = count.seen + [message.tool_call_id] %}
        {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\\n{"results": {"0": ' }}
        {{- message.content | tojson + '}}\\n]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}
"""

_PHI4_MINI = """
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = 'You are a helpful assistant.' %}{%- endif %}
{{- '<|system|>\\n' + system }}
{%- if tools %}
    {{- '\\nWrite functools[{"name": [function name], "arguments": [arguments as JSON]}, ...]\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- '<|end|>\\n' }}
{%- for message in messages if message.role != 'system' %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.content and message.role == 'tools' %}{{- '{"result": ' + message.content + '}' }}
    {%- elif message.content %}{{- message.content }}
    {%- elif message.tool_calls %}
        {{- 'functools[' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments ~ '}' }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}{{- ']' }}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

_QWEN35 = """
{%- macro show(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content or [] %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set system = show(messages[0].content) | trim if messages[0].role == 'system' else '' %}
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n<function=f>\\n<parameter=k>\\nv\\n</parameter>\\n</function>\\n</tool_call>' }}
    {{- ('\\n\\n' + system if system else '') + '<|im_end|>\\n' }}
{%- elif system %}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- set content = show(m.content) | trim %}
    {%- if m.role == 'system' and not loop.first %}{{- raise_exception('a system message must be the first') }}
    {%- elif m.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if loop.index0 > last.user %}
            {%- set content = '<think>\\n' + thought | trim + '\\n</think>\\n\\n' + content %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if not loop.first else '\\n\\n' if show(m.content) | trim else '' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {%- set is_json = value is mapping or (value is sequence and value is not string) %}
                {{- '<parameter=' + key + '>\\n' + (value | tojson if is_json else value | string) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}
"""

_NEMOTRON_NANO2 = """
{%- set ns = namespace(thinks=true) -%}
{%- for m in messages if m.role in ('user', 'system') and '/no_think' in m.content -%}
    {%- set ns.thinks = false -%}
{%- endfor -%}
{{- '<SPECIAL_10>System\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content.replace('/no_think', '').strip() -}}{%- endif -%}
{%- if tools -%}
    {{- '\\n\\n<AVAILABLE_TOOLS>[' -}}
    {%- for tool in tools -%}{{- tool.function | tojson -}}{{- '' if loop.last else ', ' -}}{%- endfor -%}
    {{- ']</AVAILABLE_TOOLS>\\n\\nCall as <TOOLCALL>[{{"name": "f", "arguments": "a"}}]</TOOLCALL>' -}}
{%- endif -%}
{{- '\\n\\n' -}}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}
        {{- '<SPECIAL_11>User\\n' + m.content.replace('/no_think', '').strip() + '\\n' -}}
    {%- elif m.role == 'tool' -%}
        {{- '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' if messages[loop.index0 - 1].role != 'tool' else '' -}}
        {{- m.content -}}
        {{- ', ' if loop.nextitem is defined and loop.nextitem.role == 'tool' else ']</TOOL_RESPONSE>\\n\\n' -}}
    {%- elif m.role == 'assistant' -%}
        {%- set content = (m.content or '').split('</think>')[-1].strip() -%}
        {{- '<SPECIAL_11>Assistant\\n' + content -}}
        {%- for call in m.tool_calls or [] -%}
            {{- ('\\n\\n' if content else '') + '<TOOLCALL>[' if loop.first else ', ' -}}
            {{- '{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
            {{- '}' + (']</TOOLCALL>' if loop.last else '') -}}
        {%- endfor -%}
        {{- '\\n<SPECIAL_12>\\n\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<SPECIAL_11>Assistant\\n' + ('<think>\\n\\n' if ns.thinks else '<think></think>') -}}
{%- endif -%}
"""

CALL_FAMILIES = {
    "Qwen 3 Coder": _QWEN3_CODER,
    "Qwen 3.5": _QWEN35,
    "GLM 4.5": _GLM45,
    "MiniMax M2": _MINIMAX_M2,
    "DeepSeek V3": _DEEPSEEK_V3,
    "DeepSeek V3.1": _DEEPSEEK_V31,
    "Kimi K2": _KIMI_K2,
    "Granite 3": _GRANITE,
    "Command R7B": _COMMAND_R7B,
    "Phi-4-mini": _PHI4_MINI,
    "Nemotron Nano 2": _NEMOTRON_NANO2,
    **LITERAL_FAMILIES,
}
