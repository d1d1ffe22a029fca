"""The parameters of one request to the five systems, and their configuration files, under the systems' own names.

`parse.parse(method, leg, mapping)` reads the kv_transfer_params of one leg and `parse.to_json` writes them again;
`request_id` builds and reads the ids in which P2P NCCL names addresses; `config` reads --kv-transfer-config and
`mooncake_json` a mooncake.json. All are functions of text or of a mapping: the caller has opened the file.

For any input, they return an object with valid values, or raise one ParamsError, which names the field, what is wrong
and what to send. A missing `tp_size` stops the whole engine of vLLM 0.32.0 (R35); here it fails that request alone. The
methods decide what a value does.
"""
