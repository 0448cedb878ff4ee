from torch import nn


class Loop:
    def __init__(self, net, opt, loader, callbacks):
        self.net, self.opt, self.loader, self.callbacks = net, opt, loader, callbacks

    def emit(self, event, epoch):
        for c in self.callbacks:
            getattr(c, event)(self, epoch)

    def run(self, epochs):
        for epoch in range(epochs):
            self.emit("epoch_start", epoch)
            for vol, dx in self.loader:
                loss = nn.functional.cross_entropy(self.net(vol.cuda()), dx.cuda())
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            self.emit("epoch_end", epoch)
