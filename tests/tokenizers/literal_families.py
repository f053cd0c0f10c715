"""Chat templates written for the tests of families whose calls have literals for arguments: Python's or Gemma's."""

from __future__ import annotations

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
                {{- param + '=' + '%r' | format(call.function.arguments[param]) }}{{- '' if loop.last else ', ' }}
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
    {{- (message['content'] or '').split('<channel|>')[-1] | trim -}}{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') -}}
{%- endif -%}
"""

_FUNCTIONGEMMA = """
{%- macro show(value) -%}
    {%- if value is string -%}{{- '<escape>' + value + '<escape>' -}}
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
{%- if tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<start_of_turn>developer\\n' -}}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}{%- set turns = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {{- '<start_function_declaration>declaration:' + tool.function.name + '{}<end_function_declaration>' -}}
    {%- endfor -%}
    {{- '<end_of_turn>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
    {%- if message['role'] == 'tool' -%}
        {{- '<start_function_response>response:' + message['name'] | default('f') + '{value:' -}}
        {{- show(message['content']) + '}<end_function_response>' -}}
    {%- else -%}
        {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
        {{- message['content'] | trim -}}
        {%- for call in message['tool_calls'] or [] -%}
            {{- '<start_function_call>call:' + call['function']['name'] + '{' -}}
            {%- for key, value in call['function']['arguments'] | dictsort -%}
                {{- key -}}:{{- show(value) -}}{{- '' if loop.last else ',' -}}
            {%- endfor -%}
            {{- '}<end_function_call>' -}}
        {%- endfor -%}
        {{- '' if message['tool_calls'] else '<end_of_turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

_OLMO3 = """
{%- if messages | selectattr('role', 'equalto', 'system') | list | length == 0 -%}
    {{- '<|im_start|>system\\nYou are a function-calling assistant. ' -}}
    {{- '<functions>' + tools | tojson + '</functions><|im_end|>\\n' if tools else '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {{- '<|im_start|>system\\n' + message['content'] -}}
        {{- '<functions>' + (tools | tojson if tools is not none else '') + '</functions><|im_end|>\\n' -}}
    {%- elif message['role'] == 'user' -%}{{- '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if message.get('content', none) is not none -%}{{- message['content'] -}}{%- endif -%}
        {%- if message.get('tool_calls', none) is not none -%}
            {{- '<function_calls>' -}}
            {%- for call in message['tool_calls'] -%}
                {%- set ns = namespace(parts=[]) -%}
                {%- for key, value in call['function']['arguments'].items() -%}
                    {%- set ns.parts = ns.parts + [key ~ '=' ~ (value | tojson)] -%}
                {%- endfor -%}
                {{- call['function']['name'] + '(' + ns.parts | join(', ') + ')' + ('' if loop.last else '\\n') -}}
            {%- endfor -%}
            {{- '</function_calls>' -}}
        {%- endif -%}
        {{- eos_token if loop.last else '<|im_end|>\\n' -}}
    {%- elif message['role'] in ['environment', 'tool'] -%}
        {{- '<|im_start|>environment\\n' + message['content'] + '<|im_end|>\\n' -}}
    {%- endif -%}
    {%- if loop.last and add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
{%- endfor -%}
"""

_LFM2 = """{{- bos_token -}}
{%- macro show(value) -%}
    {{- '%r' | format(value) if value is string else value | tojson if value is mapping else value | string -}}
{%- endmacro -%}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- if tools -%}{%- set system = system + '\\nList of tools: ' + tools | tojson -%}{%- endif -%}
{%- if system -%}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in turns -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in turns -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.thinking is defined and loop.index0 > last.user -%}
        {{- '<think>' + m.thinking + '</think>' -}}
    {%- endif -%}
    {{- m.content or '' -}}
    {%- for call in m.tool_calls or [] -%}
        {{- '<|tool_call_start|>[' if loop.first else ', ' -}}{{- call.function.name + '(' -}}
        {%- for key, value in call.function.arguments.items() -%}
            {{- key + '=' -}}{{- show(value) -}}{{- '' if loop.last else ', ' -}}
        {%- endfor -%}
        {{- ')]<|tool_call_end|>' if loop.last else ')' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LITERAL_FAMILIES = {
    "Llama 3.2 pythonic": _PYTHONIC,
    "Gemma 4": _GEMMA4,
    "FunctionGemma": _FUNCTIONGEMMA,
    "OLMo 3": _OLMO3,
    "LFM2": _LFM2,
}
