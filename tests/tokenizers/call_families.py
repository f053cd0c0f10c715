"""Chat templates written for the tests with what the published ones use around calls, marks of the family included."""

# ruff: noqa: RUF001 - DeepSeek's marks have wide characters

from __future__ import annotations

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

_PYTHONIC = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = 'You can call tools.' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}
    {{- 'Call as [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)] ' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + {'output': message.content} | tojson + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for param in call.function.arguments %}
                {{- param + '=' + '%s' | format(call.function.arguments[param]) }}{{- '' if loop.last else ', ' }}
            {%- endfor %}
            {{- ')' }}{{- '' if loop.last else ', ' }}
        {%- endfor %}
        {{- ']<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_GEMMA4 = """
{%- macro show(value) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, each in value | dictsort -%}
            {{- key -}}:{{- show(each) -}}{{- '' if loop.last else ',' -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}{%- for each in value -%}{{- show(each) -}}{{- '' if loop.last else ',' -}}{%- endfor -%}{{- ']' -}}
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}{%- set turns = messages -%}
{%- if tools or enable_thinking or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\\n' + ('<|think|>' if enable_thinking else '') -}}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}{%- set turns = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}{{- '<|tool>declaration:' + tool.function.name + '{}<tool|>' -}}{%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
    {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '<|tool_call>call:' + call['function']['name'] + '{' -}}
        {%- for key, value in call['function']['arguments'] | dictsort -%}
            {{- key -}}:{{- show(value) -}}{{- '' if loop.last else ',' -}}
        {%- endfor -%}
        {{- '}<tool_call|>' -}}
    {%- endfor -%}
    {{- message['content'].split('<channel|>')[-1] | trim -}}{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') -}}
{%- endif -%}
"""

CALL_FAMILIES = {
    "Qwen 3 Coder": _QWEN3_CODER,
    "GLM 4.5": _GLM45,
    "MiniMax M2": _MINIMAX_M2,
    "DeepSeek V3": _DEEPSEEK_V3,
    "DeepSeek V3.1": _DEEPSEEK_V31,
    "Llama 3.2 pythonic": _PYTHONIC,
    "Gemma 4": _GEMMA4,
}
