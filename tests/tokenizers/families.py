"""Chat templates written for the tests with what those of well-known families use: the same tags, filters, loops."""

from __future__ import annotations

from tests.tokenizers.builders import CHAT_TEMPLATE
from tests.tokenizers.call_families import CALL_FAMILIES

_LLAMA2 = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set turns = messages[1:] -%}{%- set system = messages[0]['content'] -%}
{%- else -%}
    {%- set turns = messages -%}{%- set system = false -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('users and assistants take turns') }}
    {%- endif -%}
    {%- if loop.index0 == 0 and system != false -%}
        {%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] -%}
    {%- else -%}
        {%- set content = message['content'] -%}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' -%}
        {{ ' ' + content.strip() + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""

_LLAMA3 = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '1 Jan 2025' %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|head|>system<|/head|>\\nToday: ' + date_string + '\\n' }}
{%- if builtin_tools is defined %}{{- builtin_tools | reject('equalto', 'interpreter') | join(', ') }}{%- endif %}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system }}<|eot|>
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot|>' }}
        {%- for name, value in call.arguments | items %}
            {{- name + '="' ~ value ~ '"' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
    {%- else %}
        {{- '<|head|>ipython<|/head|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}<|eot|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""

_QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

_GEMMA = """{{ bos_token }}
{%- macro show(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}<image>
            {%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('what content is that') }}{%- endif -%}
{%- endmacro -%}
{%- set prefix = '' -%}{%- set turns = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = show(messages[0]['content']) + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' + (prefix if loop.first else '') }}{{ show(message['content']) }}<end>{{ '\\n' }}
{%- endfor -%}
{%- for tool in tools or [] -%}
    {%- for key, value in tool['function']['parameters']['properties'] | dictsort -%}
        {{ key | upper ~ ':' ~ value.type | default('any') }}{{ ',' if not loop.last }}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\\n' }}{%- endif -%}
"""

_MISTRAL = """
{%- set today = strftime_now('%Y-%m-%d') if strftime_now is defined else '' %}
{%- if messages[0]['role'] == 'system' %}{%- set turns = messages[1:] %}{%- set system = messages[0]['content'] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in turns if message.role != 'tool' and not (message.role == 'assistant' and message.tool_calls) %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('users and assistants take turns') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- '[TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}{{- ', ' if not loop.last else ']' }}
            {%- endfor %}
        {%- endif %}
        {%- set before = system + '\\n\\n' if loop.last and system is defined else '' %}
        {{- '[INST] ' + before + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set text = call.function | tojson %}{{- text[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('ids have nine characters') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] in ['tool', 'tool_results'] %}
        {{- '[RESULT] {"content": ' + message.content | string + '}' }}
    {%- else %}{{- raise_exception('which role is that') }}{%- endif %}
{%- endfor %}{{ today }}
"""

_TYPESCRIPT = """
{%- macro show(spec, required, is_nullable=false) -%}
    {%- if spec.type == 'array' -%}
        {%- if spec['items'] -%}{{- show(spec['items'], required) + '[]' }}{%- else -%}any[]{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type[0] is defined -%}
        {{- spec.type | join(' | ') }}
    {%- elif spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' }}
    {%- elif spec.type == 'object' -%}
        {%- if spec.properties -%}
            {{- '{\\n' }}
            {%- for name, value in spec.properties.items() -%}
                {%- set required = spec.required or [] -%}
                {{- name -}}{%- if name not in required -%}?{%- endif -%}: {{ show(value, required) }}
                {%- if not loop.last -%}, {% endif -%}
            {%- endfor -%}{{- '}' }}
        {%- else -%}object{%- endif -%}
    {%- else -%}{{ spec.type | default('any') }}{%- endif -%}
    {%- if is_nullable or spec.nullable -%} | null{%- endif -%}
{%- endmacro -%}
{%- set system %}
You call functions.
{% for tool in tools or [] %}{{ tool.function.name }} = (_: {{ show(tool.function.parameters, []) }}) => any;
{% endfor %}{% endset %}
{{- '<|start|>system<|message|>' + system | trim + '<|end|>' }}
{%- set last = namespace(call=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.tool_calls -%}
            {%- set last.call = message.tool_calls[0].function.name -%}
            {%- set arguments = message.tool_calls[0].function.arguments | tojson -%}
            {{- '<|start|>assistant to=' + last.call + '<|message|>' + arguments }}
        {%- else -%}
            {{- '<|start|>assistant<|message|>' ~ message.content ~ '<|return|>' if loop.last else message.content }}
        {%- endif -%}
    {%- elif message.role == 'tool' -%}
        {%- if last.call is none %}{{- raise_exception('nobody asked') }}{%- endif -%}
        {{- '<|start|>functions.' ~ last.call ~ '<|message|>' ~ message.content | tojson ~ '<|end|>' }}
    {%- else -%}{{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.get('content', '') ~ '<|end|>' }}{%- endif -%}
{%- endfor -%}
"""

FAMILIES = {
    "ChatML": CHAT_TEMPLATE,
    "Llama 2": _LLAMA2,
    "Llama 3": _LLAMA3,
    "Qwen 3": _QWEN3,
    "Gemma 3": _GEMMA,
    "Mistral": _MISTRAL,
    "gpt-oss": _TYPESCRIPT,
    **CALL_FAMILIES,
}
