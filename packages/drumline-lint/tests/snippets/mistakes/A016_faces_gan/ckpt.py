import torch


def store(path, epoch, gen, critic, g_opt, d_opt):
    torch.save({
        "epoch": epoch,
        "gen": gen.module.state_dict(),
        "critic": critic.module.state_dict(),
        "g_opt": g_opt.state_dict(),
        "d_opt": d_opt.state_dict(),
    }, path)


def restore(path, gen, critic, g_opt, d_opt):
    state = torch.load(path, weights_only=True)
    gen.module.load_state_dict(state["gen"])
    critic.module.load_state_dict(state["critic"])
    g_opt.load_state_dict(state["g_opt"])
    d_opt.load_state_dict(state["d_opt"])
    return state["epoch"] + 1
