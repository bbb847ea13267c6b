"""Ask the model of some settings a short question, without a gateway."""

from __future__ import annotations

from collections.abc import Mapping

from farhand.config import Config
from farhand.llm.errors import NotConfigured
from farhand.llm.probe import ProbeResult, probe
from farhand.llm.registry import Models
from farhand.llm.retry import RetryPolicy


async def ask_once(settings: Config, environ: Mapping[str, str]) -> ProbeResult:
    """Ask the default model, without repeating a question that failed."""
    models = Models(
        providers=settings.providers,
        models=settings.models,
        default=settings.agent.model,
        environ=environ,
        policy=lambda _: RetryPolicy(retries=0, unreachable_retries=0),
    )
    try:
        return await probe(models.named())
    except NotConfigured as error:
        return ProbeResult(ok=False, model=models.default, seconds=0.0, error=str(error))
    finally:
        await models.close()
