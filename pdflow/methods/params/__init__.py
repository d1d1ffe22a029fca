"""What the five systems are told, under their own names: the parameters of one request, and their configuration files.

`parse.parse(method, leg, mapping)` reads the kv_transfer_params of one leg and `parse.to_json` writes them again;
`request_id` builds and reads the ids in which P2P NCCL says addresses; `config` reads --kv-transfer-config and
`mooncake_json` a mooncake.json. All are functions of text or of a mapping: whoever calls them has opened the file.

Whatever they are given, they return an object that holds what its class promises, or raise one ParamsError, which names
the field, what is wrong and what to send. vLLM 0.32.0 loses its whole engine to a missing `tp_size` (R35); here that
request alone is answered. What a value *does* is decided by the methods.
"""
