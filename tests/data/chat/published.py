"""Chat templates in the style of published ones. They are written for the tests, with the behaviour of the published templates:
what they write, where they put system messages and tools, which turns they rewrite, and how they end a conversation."""

LLAMA2 = """{%- set offset = 1 if messages[0]['role'] == 'system' else 0 -%}
{%- for message in messages[offset:] -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate') }}
    {%- endif -%}
    {%- set text = message['content'] -%}
    {%- if loop.first and offset -%}
        {%- set text = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' + text -%}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}{{- bos_token + '[INST] ' + text.strip() + ' [/INST]' -}}
    {%- else -%}{{- ' ' + text.strip() + ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}"""
MISTRAL_V1 = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}"""
MISTRAL_V3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message, rest = messages[0]["content"], messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set questions = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools and message == questions[-1] %}
            {{- "[AVAILABLE_TOOLS]SPACE[" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + ('"' + value + '"' if value is string else value | tojson) }}
                    {{- "" if loop.last else ", " }}
                {%- endfor %}
                {{- "}}" + ("]" if loop.last else ", ") }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- set before = system_message + "\\n\\n" if loop.last and system_message is defined else "" %}
        {{- "[INST]SPACE" + before + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS]SPACE[" }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception("An id of a call has 9 characters") }}
            {%- endif %}
            {%- set written = call.function | tojson %}
            {{- written[:-1] }}
            {{- ', "id": "' + call.id + '"}' + ("]" + eos_token if loop.last else ", ") }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- ANSWER + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS]SPACE{"content": ' + message.content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_7B = MISTRAL_V3.replace("SPACE", " ").replace("ANSWER", '" " + message["content"] | trim')
NEMO = MISTRAL_V3.replace("SPACE", "").replace("ANSWER", 'message["content"]')
MINISTRAL = """{%- set standard = 'You answer questions.\\nThe current date is {today}.' %}
{{- bos_token }}
{%- set offset = 1 if messages[0]['role'] == 'system' else 0 %}
{{- '[SYSTEM_PROMPT]' + (messages[0]['content'] if offset else standard) + '[/SYSTEM_PROMPT]' }}
{%- if tools is defined and tools is not none and tools | length > 0 %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages[offset:] %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- endif %}
        {%- for call in message['tool_calls'] or [] %}
            {%- set arguments = call['function']['arguments'] %}
            {%- if arguments is not string %}
                {%- set arguments = arguments | tojson | safe %}
            {%- endif %}
            {{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + message['content'] | string + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
SMOLLM3 = """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
    {%- set system_message = messages[0].content -%}
    {%- if "/no_think" in system_message -%}{%- set mode = "/no_think" -%}
    {%- elif "/think" in system_message -%}{%- set mode = "/think" -%}{%- endif -%}
    {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- if "/system_override" in system_message -%}
    {{- custom.replace("/system_override", "").rstrip() -}}
    {{- "<|im_end|>\\n" -}}
{%- else -%}
    {{- "## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\n" -}}
    {%- set today = strftime_now("%d %B %Y") -%}
    {{- "Today Date: " ~ today ~ "\\nReasoning Mode: " + mode + "\\n\\n## Custom Instructions\\n\\n" -}}
    {%- if custom -%}{{- custom + "\\n\\n" -}}
    {%- elif mode == "/think" -%}{{- "First write a <think> Thought </think>, then the solution.\\n\\n" -}}
    {%- else -%}{{- "You answer at once.\\n\\n" -}}{%- endif -%}
    {%- if xml_tools -%}
        {{- "### Tools\\n\\n<tools>\\n" -}}
        {%- for tool in xml_tools -%}{{- (tool | string) ~ "\\n" -}}{%- endfor -%}
        {{- "</tools>\\n\\n<|im_end|>\\n" -}}
    {%- endif -%}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n"  + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}
        {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" + ("" if mode == "/think" else "<think>\\n\\n</think>\\n") -}}
{%- endif -%}"""
OLMO2 = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{{- '' if loop.last else '\\n' }}
{%- endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
OLMO3 = """{%- if messages | selectattr('role', 'equalto', 'system') | list | length == 0 -%}
    {{- '<|im_start|>system\\nYou answer. ' -}}
    {{- ('<functions>' + tools | tojson + '</functions>' if tools else 'No functions.') + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {{- '<|im_start|>system\\n' + message['content'] -}}
        {%- if tools is not none -%}{{- '<functions>' -}}{{- tools | tojson -}}{{- '</functions>' -}}{%- endif -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message['role'] == 'user' -%}
        {{- '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if message.get('content', none) is not none -%}{{- message['content'] -}}{%- endif -%}
        {%- if message.get('tool_calls', none) is not none -%}
            {{- '<function_calls>' -}}
            {%- for call in message['tool_calls'] -%}
                {%- set ns = namespace(given=[]) -%}
                {%- for key, value in call['function']['arguments'].items() -%}
                    {%- set ns.given = ns.given + [key ~ '=' ~ (value | tojson)] -%}
                {%- endfor -%}
                {%- set given = ns.given | join(', ') -%}
                {{- call['function']['name'] + '(' + given + ')' -}}{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}
            {%- endfor -%}
            {{- '</function_calls>' -}}
        {%- endif -%}
        {%- if not loop.last -%}{{- '<|im_end|>' + '\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
    {%- elif message['role'] == 'tool' -%}
        {{- '<|im_start|>environment\\n' + message['content'] + '<|im_end|>\\n' -}}
    {%- endif -%}
    {%- if loop.last and add_generation_prompt -%}{{- '<|im_start|>assistant\\nTHINK' -}}{%- endif -%}
{%- endfor -%}"""
OLMO3, OLMO3_THINK = (OLMO3.replace("THINK", end) for end in ("", "<think>"))
GRANITE = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message, rest = messages[0]['content'], messages[1:] %}
{%- else %}
    {%- set rest = messages %}
    {%- set system_message = "Knowledge Cutoff Date: April 2024. Today's Date: " + strftime_now('%B %d, %Y') + "." %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in rest %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' + (' ' + controls | tojson if controls else '') + '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""
PHI3_SMALL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- '<|user|>\\n' + message['content'] + '<|end|>\\n<|assistant|>\\n' }}{% elif message['role'] == 'assistant' %}
{{- message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}"""
PHI4 = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
PHI4_REASONING = """{{ '<|im_start|>system<|im_sep|>You think in <think> tags.<|im_end|>' }}{% for message in messages %}
{%- if message['role'] in ('user', 'assistant') %}
{{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
PHI4_MINI = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
