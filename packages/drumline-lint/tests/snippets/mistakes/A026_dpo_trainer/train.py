import functools

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from launcher import setup, teardown
from modeling import DecoderLayer, LanguageModel
from prefs import preference_loader


class DPOTrainer:
    def __init__(self, beta=0.1, lr=5e-7, max_grad_norm=10.0):
        self.device = setup()
        wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer})
        kw = dict(auto_wrap_policy=wrap, device_id=self.device, sync_module_states=True)
        self.policy = FSDP(LanguageModel.pretrained("sft.pt"), **kw)
        self.reference = FSDP(LanguageModel.pretrained("sft.pt"), **kw).eval()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=lr)
        self.beta, self.max_grad_norm = beta, max_grad_norm

    def logps(self, model, ids, mask):
        logp = model(ids[:, :-1]).float().log_softmax(-1)
        tok = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (tok * mask[:, 1:]).sum(-1)

    def clip_gradient(self):
        return torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)

    def fit(self, epochs=1):
        loader, sampler = preference_loader("prefs.pt", batch_size=4)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            self.policy.train()
            for ids, mask in loader:
                ids, mask = ids.to(self.device), mask.to(self.device)
                pol = self.logps(self.policy, ids, mask).chunk(2)
                with torch.no_grad():
                    ref = self.logps(self.reference, ids, mask).chunk(2)
                margin = (pol[0] - pol[1]) - (ref[0] - ref[1])
                loss = -torch.nn.functional.logsigmoid(self.beta * margin).mean()
                loss.backward()
                self.clip_gradient()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        teardown()


if __name__ == "__main__":
    DPOTrainer().fit()
